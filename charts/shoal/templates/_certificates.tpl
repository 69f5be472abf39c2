{{/* The names of a Service within the cluster: (list $ SERVICE). */}}
{{- define "shoal.hosts" -}}
{{- $namespace := (index . 0).Release.Namespace }}
{{- $service := index . 1 }}
- {{ $service }}
- {{ $service }}.{{ $namespace }}
- {{ $service }}.{{ $namespace }}.svc
- {{ $service }}.{{ $namespace }}.svc.cluster.local
{{- end }}

{{/* Duration, key and issuer of a certificate: (list ISSUER DURATION RENEW-BEFORE). */}}
{{- define "shoal.issued" -}}
duration: {{ index . 1 }}
renewBefore: {{ index . 2 }}
privateKey:
  algorithm: ECDSA
  size: 256
  rotationPolicy: Always
issuerRef:
  name: {{ (index . 0).name }}
  kind: {{ (index . 0).kind }}
  {{- with (index . 0).group }}
  group: {{ . }}
  {{- end }}
{{- end }}

{{/* The certificate of a role: (list $ ROLE USAGES HOSTS), or with (… DURATION RENEW-BEFORE). */}}
{{- define "shoal.certificate" -}}
{{- $role := index . 1 }}
{{- $times := list "720h" "240h" }}
{{- if gt (len .) 4 }}
{{- $times = slice . 4 }}
{{- end }}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "shoal.metadata" (list (index . 0) $role) | nindent 2 }}
spec:
  secretName: {{ $role }}-tls
  commonName: shoal {{ $role }}
  uris:
    - spiffe://shoal/{{ $role }}/default
  {{- with index . 3 }}
  dnsNames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  usages:
    {{- toYaml (index . 2) | nindent 4 }}
  {{- include "shoal.issued" (prepend $times (index . 0).Values.tls.issuer) | nindent 2 }}
{{- end }}
