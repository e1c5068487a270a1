# Two images: `server` (API and dashboard; neither torch nor triton) and `tuner` (everything, for machines with a GPU).
FROM python:3.12-slim AS wheel
WORKDIR /source
RUN pip install --no-cache-dir --upgrade "pip>=25.1" hatchling
COPY pyproject.toml README.md LICENSE ./
COPY dash_kernels dash_kernels
COPY tuner tuner
COPY server server
COPY dashboard dashboard
RUN python -m hatchling build --target wheel --directory /wheels

FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN pip install --no-cache-dir --upgrade "pip>=25.1" \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin dash

FROM base AS server
COPY pyproject.toml /tmp/build/pyproject.toml
RUN cd /tmp/build && pip install --no-cache-dir --group server && rm -r /tmp/build
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl
ENV DASH_LOG=json
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=5 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["dash-serve"]
CMD ["--host", "0.0.0.0", "--port", "8000"]

# gcc and the C library's headers: Triton builds a small launcher for every kernel it starts. wget and Ray's dashboard:
# KubeRay probes with the one and submits jobs through the other (docs/cluster.md).
FROM base AS tuner
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev wget && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 /cache
COPY constraints.txt /tmp/constraints.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /wheels/*.whl)[postgres,ray]" "ray[default]"
USER 10001
ENTRYPOINT ["dash-tune"]
CMD ["--gpu", "auto"]
