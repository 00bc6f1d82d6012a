{{- /* Rights of the operator in the namespaces that it serves; a test compares them with its requests. */ -}}
{{- define "redrive.rules" -}}
# The kinds of redrive. `patch` is for finalizers and annotations, `get` for what is deleted: a watch
# may show it late.
- apiGroups: [redrive.io]
  resources: [brokerconnections, retrypolicies, rocketmqretrypolicies, replays, inspections]
  verbs: [list, watch]
# A job may write its last words later than the watch shows its end. `patch` is for the finalizer and
# the annotations of launch and end. `delete` is for those with ttlAfterFinished that have ended: the admission policy lets it delete
# no others.
- apiGroups: [redrive.io]
  resources: [replays]
  verbs: [get, patch, delete]
# As for Replays; the status of an Inspection is all that the operator writes.
- apiGroups: [redrive.io]
  resources: [inspections]
  verbs: [get, delete]
- apiGroups: [redrive.io]
  resources: [retrypolicies, rocketmqretrypolicies]
  verbs: [get, patch]
- apiGroups: [redrive.io]
  resources: [brokerconnections]
  verbs: [patch]
- apiGroups: [redrive.io]
  resources: [brokerconnections/status, retrypolicies/status, rocketmqretrypolicies/status, replays/status, inspections/status]
  verbs: [patch]
{{- if not .Values.rbac.secretNamespaces }}
{{ include "redrive.secretRules" . }}
{{- end }}
# Labels of the namespaces of policies, where a BrokerConnection selects by them. Each is read by
# name, which a Role can permit for the namespace that it lies in; namespaces are never listed. The
# uid of kube-system identifies the cluster.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
# The policy that consumers mount. Watched by a label that only redrive's have: one that is
# deleted or changed is repaired at once. The admission policy lets it patch no others.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
# Events, for `kubectl describe`.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if .Values.replay.enabled }}
# What replay jobs run as: a Replay waits until its namespace has it.
- apiGroups: [""]
  resources: [serviceaccounts]
  resourceNames: {{ list .Values.replay.serviceAccount .Values.replay.jobServiceAccount .Values.replay.inspectionServiceAccount | toJson }}
  verbs: [get]
# Rights of that account: a Replay waits until it has those of a job.
- apiGroups: [authorization.k8s.io]
  resources: [localsubjectaccessreviews]
  verbs: [create]
# Claims that a job template names: a Replay waits until its namespace has them.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
# The runs of Replays: Jobs, and those of each Spark operator that may be used. The admission policy
# bounds what is created.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create]
{{- with include "redrive.sparkGroups" . | fromJsonArray }}
- apiGroups: {{ toJson . }}
  resources: [sparkapplications]
  verbs: [list, watch, create]
{{- end }}
{{- end }}
{{- end }}

{{- define "redrive.sparkGroups" -}}
{{- $groups := dict "kubeflow" "sparkoperator.k8s.io" "apache" "spark.apache.org" }}
{{- $enabled := list }}
{{- range $name, $on := .Values.replay.launchers }}
{{- if $on }}{{ $enabled = append $enabled (get $groups $name) }}{{ end }}
{{- end }}
{{- toJson $enabled }}
{{- end }}

{{- define "redrive.secretRules" -}}
# Credentials of BrokerConnections, and whether those of a replay job are there. Each is read by name;
# Secrets are never listed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end }}

{{- /* Rights of the operator where replay jobs run: create the key that they mount, and report why their pods do not start. */ -}}
{{- define "redrive.driverRules" -}}
# Pods by their labels, and Events about one of them.
- apiGroups: [""]
  resources: [pods, events]
  verbs: [list]
# Keys of ledgers, which the pods of jobs mount. They are named after their policies, and a name
# can't be part of the right to create; the admission policy bounds the kind.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end }}

{{- /* Rights of the operator in the namespace of the release: hold the Lease, read the image of replay jobs, keep the keys of ledgers, and validate job templates. */ -}}
{{- define "redrive.releaseRules" -}}
# A name can't be part of the right to create.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "redrive.name" . | quote }}]
  verbs: [get, patch]
{{- if .Values.replay.enabled }}
- apiGroups: [""]
  resources: [podtemplates]
  resourceNames: [{{ include "redrive.replayTemplate" . | quote }}]
  verbs: [get]
# The keys from which those of ledgers are derived.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "redrive.replayTemplate" . }}-keys]
  verbs: [get]
# Dry runs, by which the API server validates job templates. None is stored.
- apiGroups: [""]
  resources: [podtemplates]
  verbs: [create]
{{- end }}
{{- end }}

{{- /* Rights of Replays with engine Job in their namespace. They make no pods. */ -}}
{{- define "redrive.jobRules" -}}
# A job reads its own Replay and the approval of it, and writes how far it is.
- apiGroups: [redrive.io]
  resources: [replays, replayapprovals]
  verbs: [get]
- apiGroups: [redrive.io]
  resources: [replays/status]
  verbs: [patch]
{{- end }}

{{- /* Rights of Inspections in their namespace. */ -}}
{{- define "redrive.inspectionRules" -}}
# A job reads its own Inspection, and writes the summary.
- apiGroups: [redrive.io]
  resources: [inspections]
  verbs: [get]
- apiGroups: [redrive.io]
  resources: [inspections/status]
  verbs: [patch]
{{- end }}

{{- /* Rights of the drivers of Spark in the namespace of their Replay. */ -}}
{{- define "redrive.replayRules" -}}
{{ include "redrive.jobRules" . }}
# A Spark driver makes its executors and what belongs to them, and deletes them. It needs no right to
# ConfigMaps: executors get none.
- apiGroups: [""]
  resources: [pods, services, persistentvolumeclaims]
  verbs: [get, list, watch, create, update, patch, delete, deletecollection]
{{- end }}

{{- /*
All that the operator may do, as a JSON list: kind of role, namespace (of a Role), suffix of its name, rules (the name of a
template).
*/ -}}
{{- define "redrive.grants" -}}
{{- $grants := list }}
{{- if not .Values.namespaces }}
{{- $grants = append $grants (dict "kind" "ClusterRole" "rules" "redrive.rules" "suffix" ".operator") }}
{{- end }}
{{- range .Values.namespaces }}
{{- $grants = append $grants (dict "kind" "Role" "namespace" . "rules" "redrive.rules" "suffix" ".operator") }}
{{- end }}
{{- range .Values.rbac.secretNamespaces }}
{{- $grants = append $grants (dict "kind" "Role" "namespace" . "rules" "redrive.secretRules" "suffix" ".secrets") }}
{{- end }}
{{- range include "redrive.replayNamespaces" . | fromJsonArray }}
{{- $grants = append $grants (dict "kind" "Role" "namespace" . "rules" "redrive.driverRules" "suffix" ".drivers") }}
{{- end }}
{{- append $grants (dict "kind" "Role" "namespace" .Release.Namespace "rules" "redrive.releaseRules" "suffix" ".release") | toJson }}
{{- end }}

{{- /*
One role and its binding. Takes kind (Role or ClusterRole), namespace (of a Role), name, rules (the name
of a template), labels (likewise), account and accountNamespace (the subject), root.
*/ -}}
{{- define "redrive.role" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}
metadata:
  name: {{ .name | quote }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels: {{- include .labels .root | nindent 4 }}
rules: {{- include .rules .root | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name | quote }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels: {{- include .labels .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name | quote }}
subjects:
  - kind: ServiceAccount
    name: {{ .account | quote }}
    namespace: {{ .accountNamespace | quote }}
{{- end }}
