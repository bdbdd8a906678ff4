{{/* Prefix of every object's name. */}}
{{- define "kvoffload.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of every object; call with (dict "root" . "component" "operator"). */}}
{{- define "kvoffload.labels" -}}
{{ include "kvoffload.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvoffload.selectorLabels" -}}
app.kubernetes.io/name: kvoffload
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* What selects one replica of the webhook; call with (dict "root" . "replica" 0). */}}
{{- define "kvoffload.replicaLabels" -}}
{{ include "kvoffload.selectorLabels" (dict "root" .root "component" "webhook") }}
kvoffload.io/webhook-replica: {{ .replica | quote }}
{{- end -}}

{{/* The webhook's name, and then each replica's, as JSON. */}}
{{- define "kvoffload.webhookNames" -}}
{{- $name := printf "%s-webhook" (include "kvoffload.name" .) -}}
{{- $names := list $name -}}
{{- range until (int .Values.webhook.replicas) -}}
{{- $names = append $names (printf "%s-%d" $name .) -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* An image's reference; call with (dict "root" . "image" .Values.image.operator). */}}
{{- define "kvoffload.image" -}}
{{- with .root.Values.global.imageRegistry }}{{ trimSuffix "/" . }}/{{ end }}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end -}}

{{- define "kvoffload.certificateSecret" -}}
{{- default (printf "%s-webhook-tls" (include "kvoffload.name" .)) .Values.webhook.certificates.secretName -}}
{{- end -}}

{{/* Security of our own pods' containers: nothing but the program. */}}
{{- define "kvoffload.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvoffload.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Environment that operator and webhook share (kvoffload_operator/settings.py). */}}
{{- define "kvoffload.environment" -}}
- name: KVOFFLOAD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: KVOFFLOAD_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: KVOFFLOAD_RELEASE
  value: {{ include "kvoffload.name" . | quote }}
- name: KVOFFLOAD_LOG_LEVEL
  value: {{ .Values.logLevel | quote }}
- name: KVOFFLOAD_WEBHOOK_NAME
  value: {{ include "kvoffload.name" . }}-webhook
- name: KVOFFLOAD_WEBHOOK_REPLICAS
  value: {{ .Values.webhook.replicas | quote }}
- name: KVOFFLOAD_CERTIFICATE_MODE
  value: {{ .Values.webhook.certificates.mode | quote }}
- name: KVOFFLOAD_CERTIFICATE_SECRET
  value: {{ include "kvoffload.certificateSecret" . }}
{{- end -}}
