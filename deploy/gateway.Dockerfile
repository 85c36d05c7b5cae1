# The gateway's processes: api, collector, control, and the migrate command. No torch.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY worker worker
COPY kernels kernels
COPY migrations migrations
RUN python -m venv /opt/batten && /opt/batten/bin/pip install --no-cache-dir '.[gateway]'

FROM python:3.11-slim
RUN useradd --create-home --uid 10001 batten && install -d -o batten /data /models
COPY --from=build /opt/batten /opt/batten
ENV PATH=/opt/batten/bin:$PATH PYTHONUNBUFFERED=1 BATTEN_DATA=/data
USER batten
VOLUME /data
ENTRYPOINT ["batten"]
CMD ["api", "--host", "0.0.0.0"]
