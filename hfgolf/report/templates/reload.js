// Reloads the page, unless nobody has rewritten it for long: then the run was killed.
function stayFresh() {
  const age = Date.now() / 1000 - live.writtenAt, note = document.getElementById("live");
  if (age > live.untilSeconds) {
    note.textContent = `Last written ${Math.round(age / 60).toLocaleString("en")} minutes ago: the run has probably ended.`;
    note.classList.remove("is-live");
    return;
  }
  setTimeout(() => document.hidden ? stayFresh() : location.reload(), 1000 * live.everySeconds);
}
stayFresh();
