{{- define "redrive.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $release := .Release.Name | replace "." "-" }}
{{- $own := ternary $release (printf "%s-%s" $release $name) (contains $name $release) }}
{{- default $own .Values.fullnameOverride | trunc 53 | trimAll "-" }}
{{- end }}

{{- /*
A name for objects of the cluster and in namespaces that several releases may write to. No other release has it:
neither part contains a dot. No ServiceAccount of jobs has it either, whose Role has the account's name. The operator's roles
have a suffix besides, which keeps them apart from `<name>-viewer.<namespace>` of people.
*/ -}}
{{- define "redrive.globalName" -}}
{{ include "redrive.name" . }}.{{ .Release.Namespace }}
{{- end }}

{{- define "redrive.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "redrive.name" .) .Values.serviceAccount.name }}
{{- else }}{{ required "serviceAccount.name: say which one to use, or set serviceAccount.create" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "redrive.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "redrive.labels" -}}
{{ include "redrive.selector" . }}
{{ include "redrive.commonLabels" . }}
{{- end }}

{{- /* Metadata of an object that exists during `helm test` only. Takes name, weight (lower ones come first) and root. */ -}}
{{- define "redrive.testMetadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
  app.kubernetes.io/component: test
  {{- include "redrive.commonLabels" .root | nindent 2 }}
annotations:
  helm.sh/hook: test
  helm.sh/hook-weight: {{ .weight | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "redrive.replayLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: replay
{{ include "redrive.commonLabels" . }}
{{- end }}

{{- /* The chart's labels and further ones, which replace common labels of the same names. Takes labels and root. */ -}}
{{- define "redrive.labelsWith" -}}
{{- merge (deepCopy (default dict .labels)) (include "redrive.labels" .root | fromYaml) | toYaml }}
{{- end }}

{{- define "redrive.commonLabels" -}}
{{- with .Values.commonLabels }}{{ toYaml . }}
{{ end -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* The reference to an image. Takes image, registry, tag (the defaults of both) and root. */ -}}
{{- define "redrive.reference" -}}
{{- with (.root.Values.global).imageRegistry | default .image.registry | default .registry }}{{ . }}/{{ end }}
{{- .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .tag .image.tag }}{{ end }}
{{- end }}

{{- define "redrive.image" -}}
{{- include "redrive.reference" (dict "image" .Values.image "registry" "" "tag" .Chart.AppVersion "root" .) }}
{{- end }}

{{- define "redrive.replayTemplate" -}}
{{ include "redrive.name" . }}-replay
{{- end }}

{{- define "redrive.jobTemplates" -}}
{{ include "redrive.name" . }}-job-templates
{{- end }}

{{- define "redrive.replayImage" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag }}
{{- include "redrive.reference" (dict "image" .Values.replay.image "registry" .Values.image.registry "tag" $tag "root" .) }}
{{- end }}

{{- /* Secrets to pull images with, as a JSON list of objects with a name. Other charts write global ones as names alone. */ -}}
{{- define "redrive.pullSecrets" -}}
{{- $secrets := .Values.imagePullSecrets }}
{{- range (.Values.global).imagePullSecrets }}
{{- $secrets = append $secrets (kindIs "string" . | ternary (dict "name" .) .) }}
{{- end }}
{{- uniq $secrets | toJson }}
{{- end }}

{{- /* Where Replays run, as a JSON list. */ -}}
{{- define "redrive.replayNamespaces" -}}
{{- $namespaces := list }}
{{- $outside := list }}
{{- if .Values.replay.enabled }}
{{- $namespaces = default .Values.namespaces .Values.replay.namespaces }}
{{- range $namespaces }}
{{- if and $.Values.namespaces (not (has . $.Values.namespaces)) }}{{ $outside = append $outside . }}{{ end }}
{{- end }}
{{- if $outside }}
{{- fail (printf "replay.namespaces: %s can't run Replays, because they are not served; add them to namespaces" (join ", " $outside)) }}
{{- end }}
{{- if and .Values.replay.secret.token (not $namespaces) }}
{{- fail "replay.secret.token: the Secret is made in no namespace; list those that run Replays in replay.namespaces" }}
{{- end }}
{{- end }}
{{- toJson $namespaces }}
{{- end }}

{{- /* Address of the runbooks, without a slash at its end: of this release, or as the values have it. */ -}}
{{- define "redrive.defaultRunbooks" -}}
{{- printf "%s/blob/v%s/docs/runbooks" .Chart.Home .Chart.AppVersion }}
{{- end }}
{{- define "redrive.runbooks" -}}
{{- default (include "redrive.defaultRunbooks" .) (.Values.prometheusRule).runbookURL | trimSuffix "/" }}
{{- end }}
