-- An approval has no status: it is a fact.
return {status = "Healthy", message = "approves up to " .. obj.spec.messages .. " messages of a Replay"}
