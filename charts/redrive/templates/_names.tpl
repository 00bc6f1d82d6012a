{{- define "redrive.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* A name for what belongs to no namespace: no two releases have the same. */ -}}
{{- define "redrive.clusterName" -}}
{{ include "redrive.name" . }}.{{ .Release.Namespace }}
{{- end }}

{{- define "redrive.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "redrive.name" .) .Values.serviceAccount.name }}
{{- else }}{{ required "serviceAccount.name: say which one to use, or set serviceAccount.create" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "redrive.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "redrive.labels" -}}
{{ include "redrive.selector" . }}
{{ include "redrive.commonLabels" . }}
{{- end }}

{{- define "redrive.replayLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: replay
{{ include "redrive.commonLabels" . }}
{{- end }}

{{- define "redrive.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* The reference to an image. Takes image and tag, the default one. A tag may be a number. */ -}}
{{- define "redrive.reference" -}}
{{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .tag .image.tag | toJson | trimAll "\"" }}{{ end }}
{{- end }}

{{- define "redrive.image" -}}
{{- $_ := required "image.repository: no image is published yet, name your own" .Values.image.repository }}
{{- include "redrive.reference" (dict "image" .Values.image "tag" .Chart.AppVersion) }}
{{- end }}

{{- define "redrive.replayImage" -}}
{{- $default := printf "%s-replay" .Values.image.repository }}
{{- $image := merge (dict "repository" (default $default .Values.replay.image.repository)) .Values.replay.image }}
{{- include "redrive.reference" (dict "image" $image "tag" (default .Chart.AppVersion .Values.image.tag)) }}
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
