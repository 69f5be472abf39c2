{{/* Egress to Redis: the pod or an external one. */}}
{{- define "shoal.redisEgress" -}}
{{- if .Values.redis.external.enabled }}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: [169.254.0.0/16]
    {{- range .Values.redis.external.namespaces }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ . }}
    {{- end }}
  ports:
    {{- range .Values.redis.external.ports }}
    - port: {{ . }}
    {{- end }}
{{- else }}
- to:
    - podSelector:
        matchLabels:
          app.kubernetes.io/component: redis
  ports:
    - port: 6379
{{- end }}
{{- end }}

{{/* Egress to the trace collector. */}}
{{- define "shoal.traceEgress" -}}
{{- with .Values.otel }}
{{- if .enabled }}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .collector.namespace }}
      podSelector:
        matchLabels:
          {{- toYaml .collector.labels | nindent 10 }}
  ports:
    - port: {{ .collector.port }}
{{- end }}
{{- end }}
{{- end }}
