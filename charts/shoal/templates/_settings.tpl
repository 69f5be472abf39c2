{{/* Environment variables of processes, as ConfigMaps' data. `settings` of values override the others. */}}

{{- define "shoal.otelSettings" -}}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ (index . 0).Values.otel.endpoint }}
OTEL_SERVICE_NAME: shoal-{{ index . 1 }}
OTEL_TRACES_SAMPLER: parentbased_traceidratio
OTEL_TRACES_SAMPLER_ARG: {{ (index . 0).Values.otel.ratio | quote }}
{{- end }}

{{/* Variables of a router or a scheduler: (list $ ROLE). */}}
{{- define "shoal.serverSettings" -}}
{{- $values := (index . 0).Values }}
{{- $role := index . 1 }}
{{- $redis := $values.redis }}
{{- $env := dict }}
{{- if not $redis.external.enabled }}
{{- $_ := set $env "SHOAL_REDIS_URL" (printf "%s://shoal-%s@redis:6379/0" (ternary "rediss" "redis" $values.tls.enabled) $role) }}
{{- else if not $redis.external.secret }}
{{- $_ := set $env "SHOAL_REDIS_URL" (get $redis.external.urls $role) }}
{{- end }}
{{- if $values.tls.enabled }}
{{- range $key, $file := dict "TLS_CERT" "tls.crt" "TLS_KEY" "tls.key" "TLS_CLIENT_CA" "ca.crt" }}
{{- $_ := set $env (printf "SHOAL_%s" $key) (printf "/etc/shoal/tls/%s" $file) }}
{{- end }}
{{- end }}
{{- $isMutual := and $values.tls.enabled (or (not $redis.external.enabled) $redis.external.mutualTls) }}
{{- if or $values.tls.enabled $redis.external.enabled }}
{{- range $key, $file := dict "CA" "ca.crt" "CERT" "tls.crt" "KEY" "tls.key" }}
{{- $_ := set $env (printf "SHOAL_REDIS_%s" $key) (ternary (printf "/etc/shoal/tls/%s" $file) "" $isMutual) }}
{{- end }}
{{- end }}
{{- if and (eq $role "router") $values.auth.jwt.enabled }}
{{- $_ := set $env "SHOAL_JWT_ISSUER" $values.auth.jwt.issuer }}
{{- $_ := set $env "SHOAL_JWT_AUDIENCE" $values.auth.jwt.audience }}
{{- end }}
{{- if $values.otel.enabled }}
{{- $env = merge $env (include "shoal.otelSettings" . | fromYaml) }}
{{- end }}
{{- range $key, $value := (get $values $role).settings }}
{{- $_ := set $env $key $value }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{/* Variables of a pool's workers: (list $ POOL). */}}
{{- define "shoal.workerSettings" -}}
{{- $root := index . 0 }}
{{- $pool := index . 1 }}
{{- $accelerator := include "shoal.accelerator" . | fromYaml }}
{{- $env := dict "SHOAL_ROUTERS" "router-headless:50051" "SHOAL_POOL" $pool.name "SHOAL_DEVICE" $accelerator.device }}
{{- $_ := set $env "SHOAL_STORE_BYTES" (include "shoal.storeBytes" (list $root $accelerator)) }}
{{- with $pool.spot }}
{{- $_ := set $env "SHOAL_SPOT" . }}
{{- end }}
{{- if $root.Values.tls.enabled }}
{{- range $key, $file := dict "CERT" "tls.crt" "KEY" "tls.key" "CA" "ca.crt" }}
{{- $_ := set $env (printf "SHOAL_TLS_%s" $key) (printf "/etc/shoal/tls/%s" $file) }}
{{- end }}
{{- end }}
{{- if $root.Values.otel.enabled }}
{{- $env = merge $env (include "shoal.otelSettings" (list $root "worker") | fromYaml) }}
{{- end }}
{{- range list $root.Values.worker.settings $pool.settings }}
{{- range $key, $value := . }}
{{- $_ := set $env $key $value }}
{{- end }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{- define "shoal.storeBytes" -}}
{{- $cache := (index . 0).Values.modelCache }}
{{- if eq $cache.type "none" }}{{ (index . 1).store.bytes }}{{ else if eq $cache.type "claim" }}{{ $cache.claim.bytes }}{{ else }}0{{ end }}
{{- end }}
