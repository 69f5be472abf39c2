{{/* Labels of every object. Pod templates set their labels: the chart's version as a label would restart all pods. */}}
{{- define "shoal.labels" -}}
app.kubernetes.io/part-of: shoal
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* metadata of an object in the namespace: (list $ NAME). Further labels and annotations: (list $ NAME LABELS ANNOTATIONS). */}}
{{- define "shoal.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "shoal.labels" $root | nindent 2 }}
  {{- if gt (len .) 2 }}
  {{- with index . 2 }}{{ toYaml . | nindent 2 }}{{ end }}
  {{- end }}
{{- if gt (len .) 3 }}
{{- with index . 3 }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Selector labels of a component's pods. */}}
{{- define "shoal.selector" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* An image of Shoal: (list $ NAME VALUES). */}}
{{- define "shoal.image" -}}
{{- $images := (index . 0).Values.images }}
{{- $name := index . 1 }}
{{- $own := index . 2 }}
{{- $repository := $own.repository | default (list $images.registry (printf "%s%s" $images.prefix $name) | compact | join "/") }}
{{- if $own.digest -}}
{{ $repository }}@{{ $own.digest }}
{{- else -}}
{{ $repository }}:{{ $own.tag | default $images.tag | default (index . 0).Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "shoal.pull" -}}
{{- with .Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* resources of a container, of {cpu, memory} and GPUs: memory requests are also limits; CPU has no limit, because throttling adds latency. */}}
{{- define "shoal.resources" -}}
{{- $gpus := index . 1 }}
{{- with index . 0 }}
requests:
  cpu: {{ .cpu | quote }}
  memory: {{ .memory }}
  {{- with $gpus }}
  nvidia.com/gpu: {{ . }}
  {{- end }}
limits:
  memory: {{ .memory }}
  {{- with $gpus }}
  nvidia.com/gpu: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Common fields of all pods: (list $ SERVICE-ACCOUNT PRIORITY). */}}
{{- define "shoal.pod" -}}
serviceAccountName: {{ index . 1 }}
automountServiceAccountToken: false
enableServiceLinks: false
priorityClassName: {{ index . 2 }}
{{- with (index . 0).Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* securityContext of a pod; true: it has a persistent disk, and fsGroup changes ownership only if needed. */}}
{{- define "shoal.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- if . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A gRPC health probe of a service. */}}
{{- define "shoal.health" -}}
grpc:
  port: 50052
  service: {{ . }}
{{- end }}

{{/* Prefers different nodes for pods of one component. */}}
{{- define "shoal.spread" -}}
{{- $component := . }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- topologyKey: {{ . }}
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "shoal.selector" $component | nindent 6 }}
{{- end }}
{{- end }}

{{- define "shoal.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A ConfigMap that processes read at start: (list $ NAME DATA). */}}
{{- define "shoal.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "shoal.metadata" (list (index . 0) (index . 1)) | nindent 2 }}
data:
  {{- index . 2 | nindent 2 }}
{{- end }}

{{/* Pod annotations that replace pods when such a ConfigMap changes. Its name stays, because old pods may restart. */}}
{{- define "shoal.checksum" -}}
annotations:
  checksum/config: {{ sha256sum . }}
{{- end }}

{{/* Environment variables of traces' resource attributes. */}}
{{- define "shoal.traceEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME)
{{- end }}

{{/* The Secret of a role's certificate as a volume. */}}
{{- define "shoal.secretVolume" -}}
- name: {{ index . 0 }}
  secret:
    secretName: {{ index . 1 }}
    defaultMode: 0440
{{- end }}

{{- define "shoal.mount" -}}
- name: {{ index . 0 }}
  mountPath: {{ index . 1 }}
  readOnly: true
{{- end }}

{{/* Names of Secrets that the user must create, separated by commas. */}}
{{- define "shoal.supplied" -}}
{{- $names := list }}
{{- with .Values.redis }}
{{- if .external.enabled }}
{{- $names = concat $names (list "redis-router" "redis-scheduler" .external.secret) }}
{{- else if not (or .auth.generate .auth.passwords.router) }}
{{- $names = concat $names (list "redis-users" "redis-router" "redis-scheduler") }}
{{- end }}
{{- end }}
{{- if and .Values.tls.enabled (not .Values.tls.certManager) }}
{{- $names = concat $names (list "router-tls" "scheduler-tls" "worker-tls") }}
{{- $names = append $names (ternary "" "redis-tls" .Values.redis.external.enabled) }}
{{- $names = append $names (ternary "scaler-tls" "" .Values.keda.enabled) }}
{{- if .Values.gateway.enabled }}
{{- $names = concat $names (list "gateway-tls" "gateway-client-tls") }}
{{- end }}
{{- if .Values.edge.enabled }}
{{- $names = append $names "edge-tls" }}
{{- $names = append $names (ternary "edge-gateway-tls" "" .Values.edge.gateway.enabled) }}
{{- end }}
{{- end }}
{{- $names = append $names (ternary .Values.auth.tokens.secret "" .Values.auth.tokens.enabled) }}
{{- $names = append $names (ternary .Values.auth.jwt.secret "" .Values.auth.jwt.enabled) }}
{{- compact $names | join ", " }}
{{- end }}
