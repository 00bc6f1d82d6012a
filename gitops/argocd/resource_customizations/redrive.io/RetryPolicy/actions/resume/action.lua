local annotations = obj.metadata.annotations or {}
annotations["redrive.io/paused"] = nil
annotations["redrive.io/requested-by"] = nil -- who acted before; Argo CD records who acts now
-- Argo CD restores a map that a script empties, so the last annotation goes with the map.
obj.metadata.annotations = next(annotations) and annotations or nil
return obj
