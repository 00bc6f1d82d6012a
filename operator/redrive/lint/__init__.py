"""Checks of manifests without a cluster and a broker, for `redrive lint`.

Reading order: `manifests` reads files and remembers the position of each field, `rules` names all
rules, `checks` applies the operator's own checks to each object and to all of them together,
`report` writes the findings.
"""
