# Trains on NVIDIA GPUs with the tested versions. PyPI's torch for Linux is built for CUDA.
#
#   docker build --tag normllava .
#   docker run --gpus all --shm-size 16g --volume $PWD/data:/normllava/data --volume $PWD/runs:/normllava/runs normllava \
#       accelerate launch -q training/sft.py --config training/recipes/Qwen3-0.6B/align.yaml
FROM python:3.12-slim

# torch.compile builds its kernels' launchers with gcc, and records name the commit by git.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc git libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /normllava
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt torch \
    && pip install --no-cache-dir --constraint constraints.txt --editable ".[train]"
