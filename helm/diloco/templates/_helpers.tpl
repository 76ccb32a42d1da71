{{- define "diloco.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- printf "%s-operator" (.Release.Name | trunc 41 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-%s-operator" (.Release.Name | trunc 20 | trimSuffix "-") ($name | trunc 20 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diloco.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "diloco.labels" -}}
{{ include "diloco.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: diloco
{{- if not .Values.plainManifests }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}
{{- end -}}

{{- define "diloco.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "diloco.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Name of an image: (dict "root" . "image" .Values.images.operator) */}}
{{- define "diloco.image" -}}
{{- $images := .root.Values.images -}}
{{- with $images.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .root.Chart.AppVersion $images.tag }}{{ end -}}
{{- end -}}

{{/* What the operator may do with jobs and what it makes of them, in every namespace that it serves. Secrets are only ever
made there, never read: a job's token is made from a key beside the operator's lease and the job's uid. */}}
{{- define "diloco.jobRules" -}}
- apiGroups: [diloco.dev]
  resources: [decoupleddilocojobs]
  verbs: [get, list, watch, patch, update, delete]
- apiGroups: [diloco.dev]
  resources: [decoupleddilocojobs/status]
  verbs: [get, patch, update]
- apiGroups: [diloco.dev]
  resources: [decoupleddilocojobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods, services, configmaps, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [apps]
  resources: [statefulsets/scale]
  verbs: [get, patch, update]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, update, delete]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- if eq .Values.operator.statusVia "proxy" }}
- apiGroups: [""]
  resources: [pods/proxy]
  verbs: [get, create]
{{- end }}
{{- end -}}
