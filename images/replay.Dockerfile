# Replay jobs: drivers and executors. From the root of a checkout:
#   docker build --file images/replay.Dockerfile --tag registry.example/redrive-replay:1 .

# Debian or Ubuntu, with Python 3.11 or newer and its module venv.
ARG BASE_IMAGE=python:3.13-slim

# Digest of it, such as sha256:…: a release pins it.
ARG BASE_DIGEST=

FROM ${BASE_IMAGE}${BASE_DIGEST:+@$BASE_DIGEST} AS build
WORKDIR /src
COPY images/build.lock images/replay.lock images/
# The archives that the tests have run with, each checked by its hash; also those with which wheels are built.
# pyspark brings all of Spark: there is no second one in the image.
RUN python3 -m venv /opt/build && \
    /opt/build/bin/pip install --require-hashes --only-binary :all: --requirement images/build.lock && \
    /opt/build/bin/pip wheel --require-hashes --no-deps --no-build-isolation --wheel-dir wheels --requirement images/replay.lock
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
RUN /opt/build/bin/hatchling build --target wheel --directory wheels && \
    python3 -m venv --without-pip /opt/redrive && \
    /opt/build/bin/pip --python /opt/redrive/bin/python3 install --no-index --no-deps wheels/*.whl && \
    site=$(/opt/redrive/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
    ln -s "$site/pyspark" /opt/redrive/spark && \
    ln -s "$site/redrive/replay/__main__.py" /opt/redrive/replay.py

FROM ${BASE_IMAGE}${BASE_DIGEST:+@$BASE_DIGEST}
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends default-jre-headless tini && \
    rm -rf /var/lib/apt/lists/* && \
    # Java finds no name for a user without an entry.
    echo 'spark:x:185:185::/work:/usr/sbin/nologin' >> /etc/passwd && echo 'spark:x:185:' >> /etc/group && \
    install --directory --owner=185 --group=185 /work
COPY --from=build /opt/redrive /opt/redrive
COPY --chmod=755 images/replay-entrypoint.sh /opt/entrypoint.sh
ENV JAVA_HOME=/usr/lib/jvm/default-java SPARK_HOME=/opt/redrive/spark PYSPARK_PYTHON=/opt/redrive/bin/python3 \
    PATH=/opt/redrive/bin:/opt/redrive/spark/bin:$PATH PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
# docs/howto/release.md says which ones a release adds.
ARG BASE_IMAGE BASE_DIGEST
LABEL org.opencontainers.image.base.name="$BASE_IMAGE" \
      org.opencontainers.image.base.digest="$BASE_DIGEST" \
      org.opencontainers.image.title="redrive-replay" \
      org.opencontainers.image.description="Retry and dead-letter topics for Apache Pulsar on Kubernetes: replay jobs" \
      org.opencontainers.image.licenses="Apache-2.0"
# A number, so that Kubernetes can tell that it is not root.
USER 185:185
ENTRYPOINT ["/opt/entrypoint.sh"]
