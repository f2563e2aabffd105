# The wheel of this clone in an image with torch:
#
#   docker build --target cpu  -t mcl .
#   docker build --target cuda -t mcl:cuda .
#   docker run --rm -v "$PWD:/work" mcl mcl-train run quickstart
#   docker run --rm --gpus all -v "$PWD:/work" mcl:cuda mcl-eval doctor
#
# The CUDA image needs the driver and the NVIDIA container toolkit on the host: the torch package brings the rest of CUDA.
# The CPU image is small where TORCH_FROM names PyTorch's index of CPU packages: --build-arg TORCH_FROM="--index-url ADDRESS".
# Not built where this was written: there was no Docker.

FROM rust:1.89-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ make python3 python3-pip && rm -rf /var/lib/apt/lists/*
WORKDIR /mcl
COPY Cargo.toml Cargo.lock Makefile README.md LICENSE-MIT LICENSE-APACHE build.rs ./
COPY .cargo/libtorch .cargo/wheel.py .cargo/
COPY benches benches
COPY examples examples
COPY protocols protocols
COPY tests tests
COPY src src
# With the CPU's libtorch for both images: the programs find CUDA when they start.
RUN make wheel TORCH=cpu

FROM python:3.12-slim-bookworm AS base
COPY --from=build /mcl/dist/ /wheel/
WORKDIR /work

FROM base AS cuda
RUN pip install --no-cache-dir /wheel/*.whl
CMD ["mcl-eval"]

# The last one is what is built without --target.
FROM base AS cpu
ARG TORCH_FROM=""
RUN pip install --no-cache-dir torch==2.13.0 $TORCH_FROM && pip install --no-cache-dir /wheel/*.whl
CMD ["mcl-eval"]
