{{/* Common parts of routers and schedulers. */}}

{{/* Environment variables of a role that a ConfigMap cannot hold: (list $ ROLE). */}}
{{- define "shoal.serverEnv" -}}
{{- $values := (index . 0).Values }}
{{- if not $values.tls.enabled }}
# Anyone in the cluster can call everything in plain text: for trials, or behind a service mesh. tls.enabled removes this.
- name: SHOAL_ALLOW_INSECURE
  value: "1"
{{- end }}
{{- if and $values.redis.external.enabled $values.redis.external.secret }}
- name: SHOAL_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $values.redis.external.secret }}
      key: {{ index . 1 }}
{{- end }}
- name: SHOAL_REDIS_PASSWORD_FILE
  value: /etc/shoal/redis/password
{{- end }}

{{/* startupProbe to lifecycle, for the service that reports readiness. */}}
{{- define "shoal.serverProbes" -}}
startupProbe:
  {{- include "shoal.health" "liveness" | nindent 2 }}
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  {{- include "shoal.health" "liveness" | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  {{- include "shoal.health" . | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
lifecycle:
  preStop:
    # Until no new connections are routed here.
    sleep:
      seconds: 5
{{- end }}

{{/* A Service for gRPC: (list $ NAME COMPONENT PORT IS-HEADLESS). */}}
{{- define "shoal.grpcService" -}}
{{- $root := index . 0 }}
apiVersion: v1
kind: Service
metadata:
  {{- include "shoal.metadata" (list $root (index . 1)) | nindent 2 }}
spec:
  {{- if index . 4 }}
  clusterIP: None
  publishNotReadyAddresses: false
  {{- end }}
  selector:
    {{- include "shoal.selector" (index . 2) | nindent 4 }}
  ports:
    - name: grpc
      port: {{ index . 3 }}
      targetPort: grpc
      {{- if not $root.Values.tls.enabled }}
      appProtocol: kubernetes.io/h2c
      {{- end }}
{{- end }}

{{- define "shoal.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "shoal.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "shoal.selector" (index . 1) | nindent 6 }}
{{- end }}
