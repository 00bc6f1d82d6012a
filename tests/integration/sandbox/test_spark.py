from __future__ import annotations

import subprocess
from pathlib import Path

import pyspark

from sandbox import spark


def test_java_takes_most_classes_of_spark_from_an_archive() -> None:
    image = spark.image()
    shown = "-Xlog:class+load"
    run = subprocess.run(
        [spark.SUBMIT, "--version"],
        env=image | {"SPARK_SUBMIT_OPTS": f"{image['SPARK_SUBMIT_OPTS']} {shown}"},
        check=True, text=True, capture_output=True,
    )  # fmt: skip
    sources = [line.rpartition("source: ")[2] for line in run.stdout.splitlines()]
    archived = sum(source.startswith("shared objects file") for source in sources)
    java = [f"{image['JAVA_HOME']}/bin/java", "-Xshare:on", "-version"]
    # That of PyPI has no classes to share, and goes without.
    shares = subprocess.run(java, check=False, capture_output=True).returncode == 0
    assert (archived > len(sources) / 2) == shares


def test_spark_python_imports_compiled_and_shipped_modules() -> None:
    shipped = Path(pyspark.__file__).parent / "python" / "lib"
    archives = [shipped / "pyspark.zip", *shipped.glob("py4j-*-src.zip")]
    run = subprocess.run(
        [spark.image()["PYSPARK_PYTHON"], "-c", "import py4j, pyspark; print(pyspark, py4j)"],
        env={"PYTHONPATH": ":".join(map(str, archives))},
        check=True, text=True, capture_output=True,
    )  # fmt: skip
    assert f"{pyspark.__file__}'" in run.stdout
    assert str(archives[1]) in run.stdout
