{{/* Suffix of `worker` in the names of a pool's objects. */}}
{{- define "shoal.poolSuffix" -}}
{{- if hasKey . "nameSuffix" }}{{ .nameSuffix }}{{ else }}-{{ .name }}{{ end }}
{{- end }}

{{/* nodeSelector of a pool's pods. */}}
{{- define "shoal.poolNodes" -}}
{{- $spot := dict "aws" (dict "eks.amazonaws.com/capacityType" "SPOT") "gcp" (dict "cloud.google.com/gke-spot" "true") }}
{{- with merge dict (.nodeSelector | default dict) (get $spot (.spot | default "") | default dict) }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* (list $ ACCELERATOR) */}}
{{- define "shoal.workerImage" -}}
{{- $images := (index . 0).Values.images }}
{{- if eq (index . 1).device "cuda" }}
{{- include "shoal.image" (list (index . 0) "worker-cuda" $images.workerCuda) }}
{{- else }}
{{- include "shoal.image" (list (index . 0) "worker-cpu" $images.workerCpu) }}
{{- end }}
{{- end }}

{{/* Device of a pool's workers: (list $ POOL). */}}
{{- define "shoal.accelerator" -}}
{{- $all := (index . 0).Values.accelerators }}
{{- $pool := index . 1 }}
{{- if not (hasKey $all $pool.accelerator) }}
{{- fail (printf "pools: %s has the accelerator %q; accelerators has %s" $pool.name $pool.accelerator (keys $all | sortAlpha | join ", ")) }}
{{- end }}
{{- get $all $pool.accelerator | toYaml }}
{{- end }}
