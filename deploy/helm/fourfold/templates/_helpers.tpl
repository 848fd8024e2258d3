{{/*
Pod settings that every service has. Call with dict "root" . "roles" (list ROLE ...).
A pod has the private keys of its own roles only; certificates must have mode 0600 and belong to the service's user.
*/}}
{{- define "fourfold.pod" -}}
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
automountServiceAccountToken: false
enableServiceLinks: false
initContainers:
  - name: certificates
    image: {{ .root.Values.images }}fourfold-coordinator:{{ .root.Values.tag }}
    command:
      - sh
      - -ec
      - |
        cd /secret
        for file in ca.pem{{ range .roles }} {{ . }}-0.pem{{ end }}; do
          [ -e $file ] || { echo "the secret has no $file; make it with: fourfold certs add certs ${file%.pem}" >&2; exit 1; }
          cp -L $file /certs/
        done
        for file in revoked.txt tokens.txt; do if [ -e $file ]; then cp -L $file /certs/; fi; done
        chmod 600 /certs/*
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    volumeMounts:
      - {name: secret, mountPath: /secret}
      - {name: certs, mountPath: /certs}
{{- end }}

{{- define "fourfold.volumes" -}}
- {name: run, persistentVolumeClaim: {claimName: {{ .Values.claim }}}}
- {name: recipe, configMap: {name: {{ .Release.Name }}-recipe}}
- {name: secret, secret: {secretName: {{ .Values.certificates }}}}
- {name: certs, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{- end }}

{{/* The container of a role. Call with dict "root" . "role" ROLE "port" PORT "gpus" COUNT. */}}
{{- define "fourfold.container" -}}
name: {{ .role }}
image: {{ .root.Values.images }}fourfold-{{ .role }}:{{ .root.Values.tag }}
args:
  {{- if ne .role "coordinator" }}
  - --coordinator={{ .root.Release.Name }}-coordinator:50050
  {{- end }}
  - --run-dir=runs/{{ .root.Release.Name }}
env:
  - {name: FOURFOLD_RECIPE, value: /etc/fourfold/recipe.toml}
  - {name: FOURFOLD_ADVERTISE, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
ports:
  - {name: {{ .role }}, containerPort: {{ .port }}}
startupProbe:
  exec: {command: &live{{ .role }} [fourfold, health, {{ .role }}, /etc/fourfold/recipe.toml, "127.0.0.1:{{ .port }}", --live]}
  failureThreshold: 120
  periodSeconds: 15
  timeoutSeconds: 10
livenessProbe:
  exec: {command: *live{{ .role }}}
  periodSeconds: 30
  timeoutSeconds: 10
readinessProbe:
  exec: {command: [fourfold, health, {{ .role }}, /etc/fourfold/recipe.toml, "127.0.0.1:{{ .port }}"]}
  periodSeconds: 15
  timeoutSeconds: 10
resources:
  requests:
    {{- toYaml .root.Values.resources.requests | nindent 4 }}
  {{- if .gpus }}
  limits: {nvidia.com/gpu: {{ .gpus }}}
  {{- end }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
volumeMounts:
  - {name: run, mountPath: /srv/fourfold}
  - {name: recipe, mountPath: /etc/fourfold}
  - {name: certs, mountPath: /srv/fourfold/certs}
  {{- if .gpus }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
{{- end }}
