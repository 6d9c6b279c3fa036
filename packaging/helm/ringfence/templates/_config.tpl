{{- /* The configuration file, from tables of values. */ -}}

{{- /* The lines of a table: `a.b = 1`. Numbers in values are floating-point numbers, and the program asks for integers. */ -}}
{{- define "ringfence.toml" -}}
{{- $at := .at -}}
{{- range $word, $value := .table }}
{{- $key := regexMatch "^[A-Za-z0-9_-]+$" $word | ternary $word ($word | toRawJson) }}
{{- if $at }}{{ $key = printf "%s.%s" $at $key }}{{ end }}
{{- if kindIs "map" $value }}
{{- include "ringfence.toml" (dict "at" $key "table" $value) }}
{{- else if kindIs "slice" $value }}
{{- $items := list }}
{{- range $value }}{{ $items = append $items (include "ringfence.scalar" (dict "key" $key "value" .)) }}{{ end }}
{{ $key }} = [{{ join ", " $items }}]
{{- else if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "ringfence.scalar" (dict "key" $key "value" $value) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "ringfence.scalar" -}}
{{- if kindIs "string" .value -}}
{{ .value | toRawJson }}
{{- else if kindIs "bool" .value -}}
{{ .value }}
{{- else if or (kindIs "float64" .value) (kindIs "int64" .value) (kindIs "int" .value) -}}
{{- if eq (floor .value) (float64 .value) -}}{{ int64 .value }}{{- else -}}{{ .value }}{{- end -}}
{{- else -}}
{{- fail (printf "config: %s: neither a text, nor a number, nor true or false" .key) -}}
{{- end -}}
{{- end -}}

{{- /* What cannot be seen by a schema. Every workload includes it, so it does not depend on which templates are rendered. */ -}}
{{- define "ringfence.check" -}}
{{- $server := .Values.server -}}
{{- if not $server.domain -}}
{{- fail "server.domain is required: the domain of sandboxes, such as sandbox.example.com, with a wildcard record" -}}
{{- end -}}
{{- if not $server.database.secretName -}}
{{- fail "server.database.secretName is required: a secret with the address of a PostgreSQL database" -}}
{{- end -}}
{{- if not $server.masterKey.secretName -}}
{{- fail "server.masterKey.secretName is required: a secret with 64 hexadecimal characters, made by: openssl rand -hex 32" -}}
{{- end -}}
{{- if and (include "ringfence.several" .) $server.persistence.existingClaim -}}
{{- fail (printf "server.persistence.existingClaim is for one server, and server.replicas is %d: each of several has a directory of its own" (int $server.replicas)) -}}
{{- end -}}
{{- if and $server.blobs.bucket (not $server.blobs.secretName) -}}
{{- fail "server.blobs.secretName is required with server.blobs.bucket: a secret with the access key" -}}
{{- end -}}
{{- if and $server.metrics.serviceMonitor.enabled (not $server.metrics.enabled) -}}
{{- fail "server.metrics.serviceMonitor.enabled requires server.metrics.enabled" -}}
{{- end -}}
{{- if and .Values.nodes.priorityClass.create .Values.nodes.priorityClassName -}}
{{- fail "nodes.priorityClassName is the name of a class that is there already: leave it out with nodes.priorityClass.create" -}}
{{- end -}}
{{- if and .Values.nodes.serverUrl (not (regexMatch "^https://.+:[0-9]+/?$" .Values.nodes.serverUrl)) -}}
{{- fail (printf "nodes.serverUrl is %q: it is https://<host>:<port>" .Values.nodes.serverUrl) -}}
{{- end -}}
{{- range $component, $values := dict "server" .Values.server "nodes" .Values.nodes -}}
{{- range $values.extraEnv -}}
{{- if has .name (list "RINGFENCE_CONFIG" "RINGFENCE_DATA_DIR" "RINGFENCE_NODES_ADDRESS" "POD_IP" "RINGFENCE_DATABASE_URL" "RINGFENCE_MASTER_KEY" "RINGFENCE_BLOBS_SECRET_ACCESS_KEY") -}}
{{- fail (printf "%s.extraEnv: %s is set by the chart, and secrets are by reference" $component .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $own := dict
  "data_dir" "the chart sets it"
  "listen" "the chart sets it"
  "metrics_listen" "use server.metrics"
  "domain" "use server.domain"
  "tls" "use server.tls.secretName"
  "tls_cert" "use server.tls.secretName"
  "tls_key" "use server.tls.secretName"
  "nodes" "use server.nodesService"
  "blobs" "use server.blobs"
  "database_url" "it may hold a password: use server.database"
  "master_key_file" "use server.masterKey" -}}
{{- range $key, $why := $own -}}
{{- if hasKey $.Values.config $key -}}
{{- fail (printf "config.%s cannot be set: %s" $key $why) -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := .Values.config -}}
{{- if contains "." $key -}}
{{- fail (printf "config: write %s as tables, such as sandbox: {memory_mb: 2048}" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "ringfence.serverConfig" -}}
{{- $server := .Values.server -}}
{{- $own := dict "data_dir" "/var/lib/ringfence/server" "listen" (printf "%s:3000" $server.address) "domain" $server.domain
  "nodes" (dict "listen" (printf "%s:3100" $server.address)) -}}
{{- if $server.metrics.enabled -}}
{{- $_ := set $own "metrics_listen" (printf "%s:%d" $server.address (int $server.metrics.port)) -}}
{{- end -}}
{{- if $server.tls.secretName -}}
{{- $_ := set $own "tls_cert" "/etc/ringfence-tls/tls.crt" -}}
{{- $_ := set $own "tls_key" "/etc/ringfence-tls/tls.key" -}}
{{- end -}}
{{- with $server.blobs -}}
{{- if .bucket -}}
{{- $blobs := dict "store" "s3" "bucket" .bucket "region" .region "prefix" .prefix "allow_http" .allowHttp -}}
{{- if .endpoint -}}{{- $_ := set $blobs "endpoint" .endpoint -}}{{- end -}}
{{- $_ := set $own "blobs" $blobs -}}
{{- end -}}
{{- end -}}
{{- include "ringfence.toml" (dict "at" "" "table" (mergeOverwrite (deepCopy .Values.config) $own)) | trim -}}
{{- end -}}

{{- /* Without what needs the names and certificates of the server. */ -}}
{{- define "ringfence.nodeConfig" -}}
{{- $own := dict "data_dir" .Values.nodes.dataPath -}}
{{- include "ringfence.toml" (dict "at" "" "table" (mergeOverwrite (omit (deepCopy .Values.config) "acme") $own)) | trim -}}
{{- end -}}
