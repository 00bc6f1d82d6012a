"""Authentication at the broker: the only place for credentials of jobs and notebooks.

`method` has the methods and the layout of mounted credentials, `oauth2` gets tokens from issuers,
`files` reads what a pod mounts or an option names. Credentials in Secrets: `kube.credentials`.
"""
