"""The report: it shows the run's figures, is self-contained, and copes with any metrics.jsonl."""

from __future__ import annotations

import json
import logging
import re
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfgolf.report import charts
from hfgolf.report import report as report_module
from hfgolf.report.charts import CHARTS, draw_charts, line_style
from hfgolf.report.curves import MAX_POINTS, read_curve, smooth
from hfgolf.report.headlines import basis
from hfgolf.report.report import render_page, write_report
from hfgolf.run import metrics
from hfgolf.run.metrics import read_metrics, read_rows
from hfgolf.run.record import final_figures, read_run, seconds_by_kind, status
from hfgolf.system.command import own_command
from hfgolf.system.wording import dollars, duration, epochs, every, size
from hfgolf.train import finish

ROOT = Path(__file__).parents[2]
STARTED_AT = 1_700_000_000.0


class Page(HTMLParser):
    """What a reader sees on a page, and what a browser would run or fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.figures: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open.append(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.fetched += [value for key, value in attributes if key in ("src", "href", "srcset", "data", "action")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts.append(data)
            return
        if "style" in self._open or not data.strip():
            return
        self.texts.append(data)
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data.strip()
        if self._open[-1:] == ["dt"]:
            self.figures[data] = ""
        elif self._open[-1:] == ["dd"]:
            self.figures[list(self.figures)[-1]] += data

    def row(self, first: str) -> list[str]:
        """Return the cells of the row that starts with `first`, without that cell."""
        (row,) = [row for row in self.rows if row and row[0] == first]
        return row[1:]


def rows(count=60, every=10, **columns):
    """Return `count` rows of `every` steps each, with an evaluation in every fifth row."""
    made = []
    for number in range(1, count + 1):
        steps = range((number - 1) * every + 1, number * every + 1)
        losses = [2 + 6 / step for step in steps]
        row = {
            "step": steps[-1],
            "tokens": 256 * steps[-1],
            "train_loss": sum(losses) / every,
            "tokens_per_second": 1000.0 + number,
            "mfu": 0.25,
            "memory_bytes": 10**9 - number,
            "train_losses": losses,
            "grad_norms": [1 / step for step in steps],
            "val_loss": None,
            "val_bits_per_byte": None,
            "learning_rate": 0.02,
            "elapsed_seconds": 1.0 * number,
            "seconds_setup": 5.0,
            "seconds_train": 0.9 * number,
            "seconds_data": 0.1 * number,
            "logged_at": STARTED_AT + 5 + number,
        }
        if number % 5 == 0:
            row |= {"golf_bytes": 100_000 + number, "golf_margin_bytes": -number, "golf_step": 0.1, "golf_loss": 0.01}
            row |= {"val_loss": losses[-1] + 0.1, "val_bits_per_byte": 1.5, "val_tokens": 100, "val_bytes": 300}
            row |= {"old_val_loss": 3.5, "old_val_bits_per_byte": 1.7}
        made.append(row | columns)
    return made


def event(kind, step, **details):
    return {"step": step, "event": kind, "elapsed_seconds": 1.0, **details}


@pytest.fixture(autouse=True)
def own_images(monkeypatch):
    to_png: Any = charts.Drawing.to_png
    monkeypatch.setattr(charts.Drawing, "to_png", to_png.__wrapped__)  # that of conftest.py draws only once
    monkeypatch.setattr(charts, "DPI", 20)  # faster


def chart(name, *folders):
    """Return the drawing of a chart."""
    drawings = draw_charts([read_run(path) for path in folders])
    return next(drawing for drawing in drawings if drawing.chart.name == name)


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes a run folder whose metrics.jsonl contains the given lines and tail."""

    def make(lines, tail="", name="tiny", **files):
        path = tmp_path / name
        path.mkdir()
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
        for file, content in files.items():
            (path / file.replace("_", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return make


def report(*folders, price=None):
    output = folders[0] / "report.html"
    write_report([read_run(path) for path in folders], output, price)
    return Page(output)


def test_final_report_shows_the_results_of_the_run(run, tiny_run, monkeypatch, caplog):
    monkeypatch.setattr(finish, "used_memory_bytes", lambda device: 12.3e9)
    with caplog.at_level(logging.INFO, logger="hfgolf"):
        path = run(tiny_run(run__price_per_hour=3600, golf__forecast_every_steps=3, train__sample_prompt="to be"))
    assert f"report           {path / 'report.html'}" in caplog.text
    lines = read_rows(path / "metrics.jsonl")
    summary = json.loads((path / "summary.json").read_text())
    page = Page(path / "report.html")
    assert page.figures["validation loss"] == f"{summary['val_loss']:.4f}" == f"{lines[-1]['val_loss']:.4f}"
    assert page.figures["bits per byte"] == f"{lines[-1]['val_bits_per_byte']:.4f}"
    assert page.figures["training loss"] == f"{lines[-1]['train_losses'][-1]:.4f}"
    assert (page.figures["steps"], page.figures["training tokens"]) == ("6", "1,536")
    assert page.figures["tokens/s, median"] == f"{np.median([row['tokens_per_second'] for row in lines]):,.0f}"
    assert page.figures["peak memory"] == "12.3 GB"
    assert page.figures["parameters"] == f"{summary['parameters']:,}" and page.figures["device"] == summary["device"]
    seconds = {key: value for key, value in summary.items() if key.startswith("seconds_")}
    assert page.figures["time"] == duration(sum(seconds.values()))
    assert page.figures["cost"] == dollars(sum(seconds.values()))
    assert sum(seconds.values()) > sum(value for key, value in lines[-1].items() if key.startswith("seconds_"))
    assert page.row("evaluate")[0] == duration(seconds["seconds_evaluate"])
    written = [event["text"] for event in read_metrics(path / "metrics.jsonl").events if event["event"] == "sample"]
    assert len(written) == 2 and all(text.startswith("to be") for text in [*written, summary["sample"]])
    assert (path / "report.html").read_text().count('<pre class="sample"><b>to be</b>') == 2  # the summary's is one
    assert f"{own_command()} generate {path} --prompt 'to be'" in page.text
    assert summary["sample"].split()[0] in page.text and "max_steps: 6 # command line" in page.text

    shown = [name for name in page.ids if name.startswith("chart-")]
    assert shown == [f"chart-{chart.name}" for chart in CHARTS if chart.name != "old_bits_per_byte"]
    assert (path / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    (shown,) = re.findall(r"!\[.*\]\((.*)\)", (path / "model" / "README.md").read_text())
    assert (path / "model" / shown).read_bytes() == (path / "report" / "loss.png").read_bytes()
    assert "price_per_hour: null" in (path / "model" / "README.md").read_text()


def test_run_that_ends_early_gets_a_report(run, tiny_run, tmp_path, edit_run):
    edit_run(lambda run_: run_.raw_model.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(SystemExit):
        run(tiny_run())
    assert "Stopped by SIGTERM at step 1; it can be resumed." in Page(tmp_path / "runs" / "tiny" / "report.html").text


def test_page_is_self_contained_and_runs_no_script(folder):
    page = report(folder([*rows(), event("rollback", 300)]))
    assert not page.fetched and not {"link", "img", "iframe", "object", "image", "script"} & set(page.tags)
    assert page.tags.count("svg") == len(CHARTS) and [chart.title for chart in CHARTS if chart.title in page.text]
    assert {f"chart-{chart.name}" for chart in CHARTS} <= set(page.ids) and len(page.ids) == len(set(page.ids))


def test_charts_follow_the_colors_of_the_page_and_evaluations_say_their_value(folder):
    path = folder(rows())
    report(path)
    html = (path / "report.html").read_text()
    (svg,) = re.findall(r'<figure id="chart-loss".*?(<svg.*?</svg>)', html, re.DOTALL)
    assert "var(--line-0)" in svg and "var(--ink)" in svg and not re.search(r"#0072b2|#1f2328", svg, re.IGNORECASE)
    said = [f"step {row['step']:,}: {row['val_loss']:.5g}" for row in rows() if row["val_loss"] is not None]
    assert re.findall("<title>(.*?)</title>", svg) == said


def test_time_split_adds_up_to_the_wall_clock(folder):
    first, second = rows(10), rows(20)[10:]
    for row in second:  # a second session, 1,000 seconds later, with its own setup
        row |= {"seconds_setup": 10.0, "logged_at": row["logged_at"] + 1000 + 5}
    run = read_run(folder([*first, event("resumed", 100), *second]))
    seconds = seconds_by_kind(run)
    assert seconds == pytest.approx({"setup": 10, "train": 18, "data": 2, "idle": 1000})
    assert sum(seconds.values()) == pytest.approx(second[-1]["logged_at"] - STARTED_AT)
    final = final_figures(run, price_per_hour=36)
    assert final["seconds"] == pytest.approx(30) and final["dollars"] == pytest.approx(0.3)


def test_time_table_adds_up_and_idle_time_is_no_share_of_the_work(folder):
    made = rows()
    made[-1]["logged_at"] += 1000
    page = report(folder(made), price=3600)
    assert page.row("train") == ["54 s", "83.1 %", "", "$54.00"]
    assert page.row("work") == ["1 min 05 s", "100 %", "", "$65.00"]
    assert page.row("idle")[:2] == ["16 min 40 s", ""] and page.row("wall clock")[:2] == ["17 min 45 s", ""]
    shares = [float(page.row(kind)[1].split()[0]) for kind in ("setup", "train", "data")]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert page.figures["cost"] == "$65.00" and "At $3,600.00 per hour" in page.text
    made[-1]["logged_at"] -= 4600  # a clock that was set back
    seconds = seconds_by_kind(read_run(folder(made, name="back")))
    assert seconds["idle"] == 0 and sum(seconds.values()) == pytest.approx(65)


def test_price_comes_from_the_option_then_the_config(folder):
    path = folder(rows(), config_yaml="run: {price_per_hour: 3600}\n")
    assert report(path).figures["cost"] == "$65.00"
    assert report(path, price=0.0).figures["cost"] == "$0.00"
    (path / "config.yaml").unlink()
    page = report(path)
    assert "cost" not in page.figures and "--price_per_hour" in page.text and "Nothing wrong" in page.text


HOSTILE = "<script>alert(1)</script>"


def test_text_from_a_run_is_escaped(folder):
    finding = event("finding", 300, symptom=HOSTILE, saw=HOSTILE, causes=[HOSTILE], fix={HOSTILE: HOSTILE})
    said = [event("sample", 100, text=HOSTILE), event("save_failed", 200, reason=HOSTILE), finding]
    profile = {"sentence": HOSTILE, "shares": {HOSTILE: 0.5}}
    name = HOSTILE.replace("/", "|")
    path = folder([*rows(), *said], name=name, config_yaml=HOSTILE, metadata_json={"x": HOSTILE}, profile_json=profile)
    other = folder(rows(), name="$_other$")
    for page in (report(path), report(path, other)):
        assert "script" not in page.tags and page.text.count("alert(1)") >= 10


@pytest.mark.parametrize("secret", ["hf_" + "aB3dE" * 7, 'correct&"hör staple"'], ids=["token", "password"])
def test_page_contains_no_secret(secret, folder, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", secret)
    said = f"it was {secret}"
    path = folder(
        [*rows(), event("save_failed", 5, reason=said), event("sample", 5, text=said), event("finding", 5, saw=said)],
        name=secret,
        config_yaml=f"run:\n  name: {secret}\n",
        metadata_json={"command": said},
        summary_json={"sample": said, "device": said},
        profile_json={"sentence": said, "shares": {}},
    )
    other = folder(rows(), name="other")
    for page in (report(path), report(path, other)):  # with several runs, charts show their names
        written = page.text + (path / "report.html").read_text()
        assert not [part for part in ("aB3dE", "correct", "staple") if part in written]
        assert written.count("[redacted]") >= 8


def test_runs_side_by_side(folder):
    one = folder(rows(), name="one", config_yaml="optim: {learning_rate: 0.01, name: muon}\nrun: {name: one}\n")
    two = folder(rows(30, tokens_per_second=77.0), name="two", config_yaml="optim: {learning_rate: 0.02, name: muon}\n")
    page = report(one, two)
    header = [row[0] for row in page.rows if len(row) == 3]  # a row for each of what differs, a column for each run
    assert header[:2] == ["run", "optim.learning_rate"]  # settings come first
    table = [{row[0]: row[column] for row in page.rows if len(row) == 3} for column in (1, 2)]
    assert [row["run"] for row in table] == ["one", "two"]
    assert [row["steps"] for row in table] == ["600", "300"] and table[1]["tokens/s, median"] == "77"
    assert [row["optim.learning_rate"] for row in table] == ["0.01", "0.02"]
    assert not {"optim.name", "run.name"} & set(header)  # the first is equal in both, the second is only the label
    (loss, *_) = draw_charts([read_run(one), read_run(two)])
    (axes,) = loss.figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]
    assert {line.get_color() for line in axes.lines} == {line_style(0)[0], line_style(1)[0]}


@pytest.mark.parametrize(
    ("change", "text", "says"),
    [
        ({"val_tokens": 110}, "aa", "bits per byte do"),
        ({"val_bytes": 301}, "aa", "different amounts of text"),
        ({}, "bb", "on different texts, so"),
    ],
)
def test_scores_on_other_tokens_or_text_do_not_compare(folder, change, text, says):
    summary = {"val_loss": 3.0, "val_bits_per_byte": 1.5, "val_tokens": 100, "val_bytes": 300}
    known = {"corpus": {"files": [["a.txt", 9, "aa"]]}}
    one, same = (folder(rows(), name=name, summary_json=summary, metadata_json=known) for name in ("one", "same"))
    of_text = {"corpus": {"files": [["a.txt", 9, text]]}}
    other = folder(rows(), name="other", summary_json=summary | change, metadata_json=of_text)
    assert says in report(one, other).text and "not compare" not in report(one, same).text


def test_runs_of_the_same_name_are_numbered(folder, tmp_path):
    paths = []
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        paths.append(folder(rows(10), name=f"{parent}/tiny"))
    assert report(*paths).rows[0] == ["run", "tiny (1)", "tiny (2)"]


def test_thirty_runs_have_distinct_line_styles():
    assert len({line_style(number)[:2] for number in range(30)}) == 30


def test_run_name_is_not_parsed_as_math(folder):
    runs = [read_run(folder(rows(10), name=name)) for name in ("_one", "a$b$c")]
    drawing = draw_charts(runs)[0]
    assert [text.get_text() for text in drawing.figure.axes[0].get_legend().get_texts()] == ["_one", "a$b$c"]


OLD = {"seconds_setup", "seconds_train", "seconds_data", "logged_at", "mfu", "memory_bytes"}


@pytest.mark.parametrize(
    ("lines", "tail", "says"),
    [
        ([{k: v for k, v in row.items() if k not in OLD} for row in rows()], "", "an older version wrote them"),
        (rows(val_loss=None, val_bits_per_byte=None), "", "metrics.jsonl has no evaluations"),
        (rows(train_loss=None, train_losses=[None] * 10, grad_norms=[None] * 10), "", "Curves"),
        (rows(**dict.fromkeys(["train_loss", "train_losses", "val_loss", "tokens_per_second", "mfu"])), "", "Curves"),
        (rows(), '{"step": 610, "tokens": 3', "Broken lines skipped in metrics.jsonl: 1."),
        (rows(1, every=1), "", "Curves"),
        ([{"step": 1}], "", "metrics.jsonl has no evaluations"),
        (rows(1, seconds_train=0.0, seconds_setup=0.0, seconds_data=0.0, logged_at=1.0), "", "wall clock"),
    ],
    ids=["old", "no evaluation", "NaN", "all NaN", "cut off", "one step", "nearly nothing", "no time"],
)
def test_unusual_rows_are_reported(folder, lines, tail, says):
    page = report(folder(lines, tail), price=1.0)
    assert says in page.text and "nan" not in page.text.lower() and "None" not in page.text
    assert page.figures["steps"] == f"{lines[-1]['step']:,}"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "metrics.jsonl does not exist; name the folder"),
        ("", "metrics.jsonl is empty: the run has logged nothing yet"),
        ('{"step": 1, "trai', "holds no row, only 1 broken lines"),
    ],
)
def test_run_without_rows_is_one_line(content, says, tmp_path, hfgolf):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    status, _, error = hfgolf("report", tmp_path)
    assert status == 2 and error.startswith("error: ") and says in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"metrics.jsonl"}
    if content is None:  # but a run
        (tmp_path / "config.yaml").write_text("")
        assert f"{tmp_path} has logged nothing yet; wait for its first step" in hfgolf("report", tmp_path).err


def test_script_writes_a_page_and_an_image(folder, tmp_path, hfgolf):
    one, two = folder(rows(), name="one"), folder(rows(), name="two")
    assert not hfgolf("report", one, "--price_per_hour", 3600).status
    assert Page(one / "report.html").figures["cost"] == "$65.00"
    assert (one / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not hfgolf("report", one, two, "--output", tmp_path / "new" / "both.html").status
    assert "2 runs side by side" in Page(tmp_path / "new" / "both.html").text
    assert (tmp_path / "new" / "both" / "loss.png").exists()
    (tmp_path / "file").write_text("")
    for options in (["--output", "x.txt"], ["--output", tmp_path / "file" / "x.html"], ["--price_per_hour", "-1"]):
        status, _, error = hfgolf("report", one, *options)
        assert status == 2 and error.startswith(f"error: {options[0]}: ") and error.count("\n") == 1


def test_script_names_no_picture_if_there_are_no_losses_to_draw(folder, hfgolf):
    run = folder([row | {"train_losses": [None], "val_loss": None} for row in rows()[:1]], name="run")
    (run / "report").mkdir()
    (run / "report" / "loss.png").write_bytes(b"of an earlier report")
    assert hfgolf("report", run).out == f"wrote {run / 'report.html'}\n"


def test_long_curve_retains_mean_and_extremes():
    losses = np.random.default_rng(0).normal(3, 1, (5000, 10))
    losses[1234, 5], losses[77, 7] = 99.0, -99.0
    made: list[dict[str, Any]] = [
        {"step": 10 * n, "loss": [None if abs(x - 3) < 0.1 else x for x in of_row]}
        for n, of_row in enumerate(losses, 1)
    ]
    given = [x for row in made for x in row["loss"] if x is not None]
    curve = read_curve(made, "loss")
    assert len(curve) == MAX_POINTS and 50 <= curve.values_per_point <= 63
    assert curve.highest.max() == 99 and curve.lowest.min() == -99
    assert (curve.lowest <= curve.values).all() and (curve.values <= curve.highest).all()
    assert np.mean(curve.values) == pytest.approx(np.mean(given), abs=0.01)
    assert np.median(np.abs(curve.values - 3)) < 0.2  # means, not single values
    assert (np.diff(curve.steps) > 0).all() and curve.steps[0] < 130 and curve.steps[-1] > 49_870


@pytest.mark.parametrize("window", [1, 3, 7, 29, 49])
def test_a_smoothed_line_is_neither_late_nor_bent_at_its_ends_and_has_as_many_values_on_both_sides(window):
    values, half = np.random.default_rng(0).normal(0, 1, 50), window // 4 * 2 + 1
    smoothed, reach = smooth(values, window), half - 1
    assert 2 * reach + 1 <= window < 2 * reach + 4
    inside = range(reach, 50 - reach)
    for place in inside:
        centers = range(place - reach // 2, place + reach // 2 + 1)
        medians = [np.median(values[center - reach // 2 : center + reach // 2 + 1]) for center in centers]
        assert smoothed[place] == pytest.approx(np.mean(medians))
    assert np.isfinite(smoothed).nonzero()[0].tolist() == list(inside)
    line = np.arange(50.0)
    assert smooth(line, window)[reach : 50 - reach] == pytest.approx(line[reach : 50 - reach])


def test_a_spike_of_the_gradient_norm_does_not_lift_its_line(folder):
    norms = [0.5] * 600
    norms[300] = 1e6
    path = folder([{**row, "grad_norms": norms[10 * n : 10 * n + 10]} for n, row in enumerate(rows(60))])
    norm = chart("grad_norm", path)
    raw, smoothed = norm.figure.axes[0].lines[:2]
    assert np.nanmax(smoothed.get_ydata()) == 0.5 and max(raw.get_ydata()) == 1e6
    assert norm.caption.startswith("The line is smoothed over 31 steps") and norm.caption in report(path).text


def test_noise_is_drawn_below_its_smoothed_line_and_the_page_says_how(folder):
    path = folder(rows(60))
    raw, training, validation = chart("loss", path).figure.axes[0].lines
    assert [len(line.get_xdata()) for line in (raw, training, validation)] == [600, 600, 12]
    assert "The training line is smoothed over 31 steps" in report(path).text


def test_short_curve_is_drawn_unchanged():
    made = [{"step": 2, "x": [1.0, None]}, {"step": 3, "x": 5.0}, {"step": 4}]
    curve = read_curve(made, "x")
    assert (curve.steps.tolist(), curve.values.tolist(), curve.values_per_point) == ([1, 3], [1, 5], 1)


def test_long_file_is_sampled_and_the_page_says_so(folder, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_ROWS", 1000)
    path = folder([*rows(3000, every=1), event("rollback", 3000)])
    page = report(path)
    assert "too long to draw whole" in page.text and "rollback (1)" in page.text
    assert page.figures["steps"] == "3,000" and (path / "report.html").stat().st_size < 500_000


def test_page_of_100_000_steps_or_of_thirty_runs_is_small(folder):
    assert "125 values" in report(folder(rows(2000, every=50), name="long")).text
    runs = [folder(rows(), name=f"run{number}") for number in range(30)]
    report(*runs)
    assert max(path.stat().st_size for path in runs[0].parent.glob("*/report.html")) < 1_000_000


def test_the_curve_and_the_score_are_told_apart(folder):
    summary = {"val_loss": 2.0, "val_bits_per_byte": 1.4, "val_tokens": 250, "val_bytes": 700, "step": 550}
    page = report(folder(rows(), summary_json=summary))
    assert page.figures["validation loss"] == "2.0000"
    assert "of the exported weights (step 550), on all 250 validation tokens (700 bytes)" in page.text
    assert "The curve ends at 2.1100, the evaluation of step 600, on the first 100 tokens" in page.text
    assert len(basis(read_run(folder(rows(), name="running")))) == 1


def test_headlines_say_what_they_mean(folder):
    scores = {"gzip_bits_per_byte": 2.4, "xz_bits_per_byte": 2.0, "compressed_bytes": 100, "val_bytes": 808}
    page = report(folder(rows(), summary_json={"val_loss": 2.0, "val_bits_per_byte": 1.6} | scores))
    assert list(page.figures)[:3] == ["validation loss", "bits per byte", "time"]
    assert "as a fair choice among 7." in page.text
    said = "The text takes 20.0% of its bytes, if this model compresses it. gzip -9 makes it 30.0%, xz -9e 25.0%"
    assert f"{said} of its first 100 bytes." in page.text
    diverged = report(folder(rows(val_loss=40.0, val_bits_per_byte=19.0), name="diverged"))
    assert "Worse than a guess" in diverged.text and "More than the 8 bits" in diverged.text


def test_page_says_when_on_what_and_how(folder):
    metadata, summary = {"command": ["python", "train.py", "--x", "a b"]}, {"model": "runs/tiny/model"}
    path = folder(rows(), metadata_json=metadata, summary_json=summary, config_yaml="data: {files: [a.txt, b.txt]}\n")
    text = report(path).text
    for said in ("started 2023-11-14 22:13 UTC", "text a.txt, b.txt", "command python train.py --x 'a b'"):
        assert said in text


def test_page_reloads_only_while_the_run_lasts(folder, monkeypatch):
    monkeypatch.setattr(report_module.time, "time", lambda: STARTED_AT)
    run = read_run(folder(rows()))
    live = folder([], name="page") / "live.html"
    live.write_text(render_page([run], rewrite_seconds=100.0))
    stated = {"writtenAt": STARTED_AT, "everySeconds": 25.0, "untilSeconds": 1000.0}  # a killed run's page stops then
    assert lasts(live) == stated and "Running: step 600. Written 2023-11-14 22:13 UTC" in Page(live).text
    live.write_text(render_page([run], rewrite_seconds=0.1))
    assert (lasts(live)["everySeconds"], lasts(live)["untilSeconds"]) == (5.0, 600.0)
    live.write_text(render_page([run]))
    assert not Page(live).scripts and "Running" not in Page(live).text


def lasts(path):
    """Return what the script on a live page is told."""
    (script,) = Page(path).scripts
    assert "location.reload()" in script
    return json.loads(re.search("const live = (.*);", script)[1])


def test_many_events_still_make_a_small_page(folder):
    skips = (event("skipped_step", n, block_starts=list(range(500)), first_parameter="x") for n in range(1, 5001))
    path = folder([*rows(), *skips])
    page = report(path)
    assert "skipped step (5,000)" in page.text and "And 4,900 more" in page.text
    assert (path / "report.html").stat().st_size < 1_000_000


def test_events_are_marked_where_they_happened(folder, tmp_path):
    run = read_run(folder([*rows(), event("rollback", 120), event("skipped_step", 480), event("unheard of", 7)]))
    for drawing in draw_charts([run]):
        (axes,) = drawing.figure.axes
        marks = {line.get_marker(): line.get_xdata().tolist() for line in axes.lines if len(line.get_xdata()) == 1}
        assert marks == {"<": [120], "x": [480]}, drawing.chart.name
    assert "◀ rollback (1)" in report(tmp_path / "tiny").text


def test_spike_switches_the_loss_axis_to_log_scale(folder):
    made = rows()
    assert chart("loss", folder(made, name="calm")).figure.axes[0].get_yscale() == "linear"
    made[30]["train_losses"][3] = 500.0
    axes = chart("loss", folder(made, name="spiky")).figure.axes[0]
    assert axes.get_yscale() == "log" and axes.get_ylim()[1] > 500


def test_clipping_threshold_is_drawn(folder):
    path = folder(rows(), config_yaml="train: {max_grad_norm: 0.5}\n")
    (line,) = [line for line in chart("grad_norm", path).figure.axes[0].lines if line.get_label() == "clipped to 0.5"]
    assert set(line.get_ydata()) == {0.5}


def test_findings_profile_and_samples_are_shown(folder):
    finding = event("finding", 300, symptom="plateau", saw="flat since 200", causes=["too low"], fix={"optim.x": 0.1})
    samples = [event("sample", step, text=f"text of {step}") for step in (100, 200)]
    profile = {"sentence": "Bound by memory.", "shares": {"forward": 0.25, "backward": 0.75}}
    summary = {"step": 600, "sample": "end"}
    page = report(folder([*rows(), *samples, finding], profile_json=profile, summary_json=summary))
    for text in ("plateau step 300 flat since 200", "1", "too low", "optim.x: 0.1", "Bound by memory."):
        assert text in page.text
    assert page.row("backward")[0] == "75.0 %"
    assert page.text.index("text of 100") < page.text.index("text of 200") < page.text.index("Step 600")
    assert page.text.index("Step 600") < page.text.index("end", page.text.index("Step 600"))


def test_figures_and_samples_of_a_run_that_exports_averages_are_theirs(folder):
    averaged = {"val_loss_ema": 2.0625, "val_bits_per_byte_ema": 1.4375}
    lines = [*rows(**averaged), event("sample", 600, text="text of 600")]
    page = report(folder(lines, config_yaml="optim: {ema_decay: 0.9, ema_export: true}"))
    assert page.figures["validation loss"].startswith("2.0625") and page.figures["bits per byte"] == "1.4375"
    assert "Step 600 loss 2.0625" in page.text


@pytest.mark.parametrize(
    ("events", "summary", "says"),
    [
        ([], {"steps": 600}, "Complete: 600 steps."),
        ([event("stopped", 600, signal="SIGINT")], {}, "Stopped by SIGINT at step 600"),
        ([event("stopped", 300, signal="SIGINT")], {}, "failed after its last row of 2023-11-14 22:14 UTC, step 600"),
    ],
)
def test_page_says_how_the_run_ended(events, summary, says, folder):
    assert says in status(read_run(folder([*rows(), *events], summary_json=summary)))


def test_damaged_files_are_skipped(folder):
    damaged = {"config_yaml": "a: [", "metadata_json": "{", "summary_json": "[1]", "profile_json": '{"shares": 3}'}
    page = report(folder(rows(), **damaged))
    assert page.figures["steps"] == "600" and "Not complete" in page.text and "Profile" not in page.text
    page = report(folder(rows(), name="NaN", summary_json='{"val_loss": NaN, "val_bits_per_byte": Infinity}'))
    assert not {"validation loss", "bits per byte"} & set(page.figures)


def test_figures_have_their_units():
    assert [every(number, "step") for number in (1, 1200)] == ["every step", "every 1,200 steps"]
    assert [epochs(count) for count in (0.0123, 2.04, 999.4, 1528.6)] == [
        *("0.0123 epochs", "2.04 epochs", "999 epochs", "1,529 epochs")
    ]
    assert [duration(s) for s in (0, 0.0264, 0.1, 9.94, 9.96, 59.6, 299, 3599.6, 25_320)] == [
        *("0 ms", "26 ms", "0.1 s", "9.9 s", "10 s", "1 min 00 s", "4 min 59 s", "1 h 00 min", "7 h 02 min")
    ]
    assert [size(b) for b in (640e6, 949e6, 1.1e9)] == ["640 MB", "949 MB", "1.1 GB"]
    assert [dollars(d) for d in (0, 0.00123, 0.1, 1234.5)] == ["$0.00", "$0.0012", "$0.10", "$1,234.50"]
