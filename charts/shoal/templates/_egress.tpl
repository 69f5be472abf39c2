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

{{/* Egress to object stores at public addresses, and to the servers that give credentials for them. */}}
{{- define "shoal.storeEgress" -}}
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except: [10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16]
    - ipBlock:
        cidr: ::/0
        except: [64:ff9b::/96, 64:ff9b:1::/48, fc00::/7, fe80::/10]
  ports:
    - port: 443
# Credentials of stores, and preemption notices of spot machines: the metadata servers of AWS and Google Cloud, EKS' Pod Identity, GKE's
# Workload Identity without Dataplane V2.
- to:
    - ipBlock:
        cidr: 169.254.169.254/32
    - ipBlock:
        cidr: 169.254.170.23/32
  ports:
    - port: 80
- to:
    - ipBlock:
        cidr: 169.254.169.252/32
  ports:
    - port: 988
{{- end }}
