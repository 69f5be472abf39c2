{{/* A file of queries from k8s/, with the release's namespace instead of shoal: (list $ PATH). */}}
{{- define "shoal.inNamespace" -}}
{{- $namespace := (index . 0).Release.Namespace }}
{{- $text := (index . 0).Files.Get (index . 1) }}
{{- $text | trim | replace "\"shoal/" (printf "\"%s/" $namespace) | replace "\\\"shoal/" (printf "\\\"%s/" $namespace) | replace "namespace=\"shoal\"" (printf "namespace=%q" $namespace) }}
{{- end }}
