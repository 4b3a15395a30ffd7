# An image with everything pinned. Build and train:
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) -t hfgolf .
#   docker run --gpus all -v $PWD/runs:/hfgolf/runs hfgolf --config configs/small.yaml
# tests/test_packaging.py holds these pins equal to constraints.txt.
ARG CUDA_VERSION=13.0.1
ARG PYTHON_VERSION=3.11.14

FROM python:${PYTHON_VERSION}-slim-bookworm AS python
FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04

# g++ and the Python headers (which come with /usr/local): torch.compile makes C++ and Triton code
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libbz2-1.0 libexpat1 libffi8 liblzma5 libsqlite3-0 libssl3t64 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=python /usr/local /usr/local
RUN ldconfig

ARG TORCH_VERSION=2.13.0
ARG NUMPY_VERSION=2.4.6
WORKDIR /hfgolf
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch==${TORCH_VERSION} numpy==${NUMPY_VERSION}
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[gpu]"

ARG COMMIT=unknown
LABEL org.opencontainers.image.revision=${COMMIT} org.opencontainers.image.licenses=Apache-2.0
# read into each run's metadata.json
ENV HFGOLF_COMMIT=${COMMIT}
ENTRYPOINT ["accelerate", "launch", "--quiet", "scripts/train.py"]
