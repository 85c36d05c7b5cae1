# One engine. Kernels are compiled at first use, so the compiler is part of the image.
# TORCH_INDEX: https://download.pytorch.org/whl/cpu for machines without a GPU; empty for the
# default build (CUDA).
FROM python:3.11-slim
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
RUN python -m venv /opt/batten \
    && torch="$(grep -oE '"torch==[0-9.]+"' pyproject.toml | head -n 1 | tr -d '"')" \
    && /opt/batten/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
COPY gateway gateway
COPY worker worker
COPY kernels kernels
COPY migrations migrations
RUN /opt/batten/bin/pip install --no-cache-dir '.[worker]' \
    && useradd --create-home --uid 10001 batten && install -d -o batten /data /models
ENV PATH=/opt/batten/bin:$PATH PYTHONUNBUFFERED=1 BATTEN_DATA=/data
USER batten
VOLUME /data
ENTRYPOINT ["python", "-m", "worker"]
