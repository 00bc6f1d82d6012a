"""Inspection: dead letters, and messages that wait for a retry, as people read them.

Reading is by position and consumes nothing. Reading order: `reader`, the spine, returns the
selected messages of a topic; `payloads` decodes and masks; `record` is a message for people and
programs; `summary` groups messages by cause; `controller` runs Inspections as Jobs of `__main__`.
"""
