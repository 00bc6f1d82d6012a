local annotations = obj.metadata.annotations or {}
annotations["redrive.io/paused"] = "true"
annotations["redrive.io/requested-by"] = nil -- who acted before; Argo CD records who acts now
obj.metadata.annotations = annotations
return obj
