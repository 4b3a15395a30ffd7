# An image with everything pinned. Build and train:
#   make image
#   docker run --gpus all -v $PWD/runs:/hfgolf/runs hfgolf --config configs/small.yaml
# Python is pinned here, Debian's packages by SNAPSHOT, and torch, NumPy, CUDA and the rest in constraints.txt: torch's
# wheels bring CUDA's libraries, and the NVIDIA container runtime brings the driver.
# A tag can be pushed again. For the same bytes, add its digest: docker images --digests python
FROM python:3.11.14-slim-bookworm AS python

# A stage of its own: it fails at once, and a new commit doesn't rebuild the layers below.
FROM python AS commit
ARG COMMIT
RUN echo "$COMMIT" | grep -Exq '[0-9a-f]{40}(-dirty)?' && echo "$COMMIT" > /commit \
    || { echo "error: COMMIT is '$COMMIT', no commit; build with: make image" >&2; exit 1; }

FROM python
# g++: torch.compile makes C++ on a CPU and C for Triton; Python's headers are in /usr/local.
ARG SNAPSHOT=20261122T000000Z
RUN sed -i "s|deb.debian.org/\(debian[a-z-]*\)|snapshot.debian.org/archive/\1/$SNAPSHOT|" /etc/apt/sources.list.d/debian.sources \
    && apt-get -o Acquire::Check-Valid-Until=false update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /hfgolf
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch numpy setuptools
COPY . .
RUN pip install --no-cache-dir -c constraints.txt --no-build-isolation ".[gpu,golf]"

# Compute and NVML, also where the container isn't started by docker run --gpus.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=commit /commit ./COMMIT
ARG COMMIT
LABEL org.opencontainers.image.revision=$COMMIT org.opencontainers.image.licenses=Apache-2.0
# read into each run's metadata.json
ENV HFGOLF_COMMIT=$COMMIT
ENTRYPOINT ["accelerate", "launch", "--quiet", "scripts/train.py"]
