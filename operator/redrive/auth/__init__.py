"""Authentication at the broker: the only place for credentials of jobs and notebooks.

`method` has the methods and the layout of mounted credentials, `oauth2` gets tokens from issuers,
`files` reads what a pod mounts or an option names. Those of the operator, in Secrets, are in
`kube.credentials`. An application gives its consumer a `pulsar.Client` with its own credentials.
"""
