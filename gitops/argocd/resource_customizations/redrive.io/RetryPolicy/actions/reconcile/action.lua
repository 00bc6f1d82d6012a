local os = require("os")

local annotations = obj.metadata.annotations or {}
annotations["redrive.io/reconcile-requested-at"] = os.date("!%Y-%m-%dT%H:%M:%SZ")
annotations["redrive.io/requested-by"] = nil -- who acted before; Argo CD records who acts now
obj.metadata.annotations = annotations
return obj
