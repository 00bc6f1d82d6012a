"""`python -m release`: write again what is generated and kept in the repository."""

from __future__ import annotations

from release import chart_readme, dashboard, values_schema, versions

GENERATED = {
    chart_readme.README: chart_readme.render,
    dashboard.DASHBOARD: dashboard.render,
    values_schema.SCHEMA: values_schema.render,
    versions.CHART_FILE: versions.render_chart_file,
}

if __name__ == "__main__":
    for file, render in GENERATED.items():
        file.write_text(render(), "utf-8")
