# The packages in an image of redrive, those of its system too, in the format of CycloneDX. From the root of a checkout:
#   docker build --file images/sbom.Dockerfile --build-arg IMAGE=registry.example/redrive:1 --output dist .
ARG IMAGE

FROM ${IMAGE} AS build
USER 0:0
COPY images/sbom.py /tmp/sbom.py
RUN python3 /tmp/sbom.py > /tmp/sbom.cdx.json

FROM scratch
COPY --from=build /tmp/sbom.cdx.json /
