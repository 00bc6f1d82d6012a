# The operator. From the root of a checkout:
#   docker build --file images/operator.Dockerfile --tag registry.example/redrive:1 .

# Python 3.11 or newer, with its module venv. It may be any Linux.
ARG BASE_IMAGE=python:3.13-slim

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY requirements.lock ./
# The versions that the tests have run with.
RUN sed -e '/^ *--hash=/d' -e 's/ \\$//' requirements.lock > constraints.txt && python3 -m venv /opt/redrive
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
RUN /opt/redrive/bin/pip install --constraint constraints.txt '.[operator,cli]' && \
    /opt/redrive/bin/pip uninstall --yes pip setuptools

FROM ${BASE_IMAGE}
COPY --from=build /opt/redrive /opt/redrive
ENV PATH=/opt/redrive/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# docs/howto/release.md says which ones a release adds.
LABEL org.opencontainers.image.title="redrive" \
      org.opencontainers.image.description="Retry and dead-letter topics for Apache Pulsar on Kubernetes: the operator" \
      org.opencontainers.image.licenses="Apache-2.0"
# A number, so that Kubernetes can tell that it is not root.
USER 65532:65532
ENTRYPOINT ["redrive"]
