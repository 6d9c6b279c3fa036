{{- /* Names and labels of objects. */ -}}

{{- define "ringfence.fullname" -}}
{{- $default := ternary .Release.Name (printf "%s-ringfence" .Release.Name) (contains "ringfence" .Release.Name) -}}
{{- /* With room for what follows: names of services have 63 characters at most. */ -}}
{{- .Values.fullnameOverride | default $default | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "ringfence.selector" -}}
app.kubernetes.io/name: ringfence
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "ringfence.labels" -}}
{{ include "ringfence.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "ringfence.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository ($image.tag | default .Chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{- define "ringfence.serverUrl" -}}
{{- $own := printf "https://%s-nodes.%s.svc:%d" (include "ringfence.fullname" .) .Release.Namespace (int .Values.server.nodesService.port) -}}
{{- .Values.nodes.serverUrl | default $own -}}
{{- end -}}

{{- /* Not empty if there are several servers. */ -}}
{{- define "ringfence.several" -}}
{{- if gt (int .Values.server.replicas) 1 }}true{{ end -}}
{{- end -}}

{{- define "ringfence.joinSecret" -}}
{{- .Values.nodes.join.secretName | default (printf "%s-join" (include "ringfence.fullname" .)) -}}
{{- end -}}

{{- /* Not a default of the values, which helm would merge with the labels of an operator. */ -}}
{{- define "ringfence.nodeSelector" -}}
{{- .Values.nodes.nodeSelector | default (dict "ringfence/node" "true") | toYaml -}}
{{- end -}}

{{- define "ringfence.nodePriorityClass" -}}
{{- if .Values.nodes.priorityClass.create -}}
{{ include "ringfence.fullname" . }}-node
{{- else -}}
{{ .Values.nodes.priorityClassName }}
{{- end -}}
{{- end -}}
