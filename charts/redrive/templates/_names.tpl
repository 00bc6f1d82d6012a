{{- define "redrive.name" -}}
{{- if contains "redrive" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-redrive{{ end }}
{{- end }}

{{- define "redrive.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "redrive.name" .) .Values.serviceAccount.name }}
{{- else }}{{ required "serviceAccount.name: say which one to use, or set serviceAccount.create" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "redrive.selector" -}}
app.kubernetes.io/name: redrive
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "redrive.labels" -}}
{{ include "redrive.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "redrive.kubeId" -}}
{{- if .Values.clusterId }}{{ .Values.clusterId }}
{{- else }}{{ with lookup "v1" "Namespace" "" "kube-system" }}{{ .metadata.uid }}{{ end }}
{{- end }}
{{- end }}
