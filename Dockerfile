# All commands in a container, with the locked packages. The host needs NVIDIA's driver and the NVIDIA Container Toolkit.
#
#   docker build --tag yolo-seg-ddp .
#   run="docker run --init --rm --shm-size=8g --stop-timeout=90 -v $PWD/data:/data -v $PWD/models:/runs"
#   $run yolo-seg-ddp python prepare_data.py --data /data/mine/dataset.yaml       # needs no GPU
#   $run --gpus=all yolo-seg-ddp bash train_ddp.sh -- --data /data/mine/dataset.yaml --save-dir /runs/mine
#
# The same command again continues a training that was stopped. `docker stop` gives it 90 seconds to save.
# launch/trainjob.yaml and launch/skypilot.yaml use this image.

# Debian 12 and Python 3.11, for which requirements.lock was made.
FROM python:3.11-slim-bookworm

# Two libraries that OpenCV opens, in Debian's present version: it keeps no older one that could be named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace

# The packages have a layer of their own, because they change less often than the project.
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock

COPY . ./

# Lines appear in the container's log at once.
ENV PYTHONUNBUFFERED=1
