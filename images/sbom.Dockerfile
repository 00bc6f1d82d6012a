# The packages in an image of redrive, in the format of CycloneDX. From the root of a checkout:
#   docker build --file images/sbom.Dockerfile --build-arg IMAGE=registry.example/redrive:1 --output dist .
ARG IMAGE
ARG BASE_IMAGE=python:3.13-slim

FROM ${IMAGE} AS image

FROM ${BASE_IMAGE} AS build
RUN python3 -m venv /opt/cyclonedx && /opt/cyclonedx/bin/pip install cyclonedx-bom==7.5.0
COPY --from=image /opt/redrive /opt/redrive
RUN /opt/cyclonedx/bin/cyclonedx-py environment --output-reproducible --output-file /sbom.cdx.json /opt/redrive

FROM scratch
COPY --from=build /sbom.cdx.json /
