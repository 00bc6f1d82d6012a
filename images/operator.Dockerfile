# The operator. From the root of a checkout:
#   docker build --file images/operator.Dockerfile --tag registry.example/redrive:1 .

# Python 3.11 or newer, with its module venv. It may be any Linux.
ARG BASE_IMAGE=python:3.13-slim

# Digest of it, such as sha256:…: a release pins it.
ARG BASE_DIGEST=

FROM ${BASE_IMAGE}${BASE_DIGEST:+@$BASE_DIGEST} AS build
WORKDIR /src
COPY images/build.lock images/operator.lock images/
# The archives that the tests have run with, each checked by its hash; also those with which wheels are built.
RUN python3 -m venv /opt/build && \
    /opt/build/bin/pip install --require-hashes --only-binary :all: --requirement images/build.lock && \
    /opt/build/bin/pip wheel --require-hashes --no-deps --no-build-isolation --wheel-dir wheels --requirement images/operator.lock
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
RUN /opt/build/bin/hatchling build --target wheel --directory wheels && \
    python3 -m venv --without-pip /opt/redrive && \
    /opt/build/bin/pip --python /opt/redrive/bin/python3 install --no-index --no-deps wheels/*.whl

FROM ${BASE_IMAGE}${BASE_DIGEST:+@$BASE_DIGEST}
COPY --from=build /opt/redrive /opt/redrive
ENV PATH=/opt/redrive/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# docs/howto/release.md says which ones a release adds.
ARG BASE_IMAGE BASE_DIGEST
LABEL org.opencontainers.image.base.name="$BASE_IMAGE" \
      org.opencontainers.image.base.digest="$BASE_DIGEST" \
      org.opencontainers.image.title="redrive" \
      org.opencontainers.image.description="Retry and dead-letter topics for Apache Pulsar on Kubernetes: the operator" \
      org.opencontainers.image.licenses="Apache-2.0"
# A number, so that Kubernetes can tell that it is not root.
USER 65532:65532
ENTRYPOINT ["redrive"]
