// Judges what the chart renders, as a cluster would, without a cluster.
//
//	judge objects <objects.yaml   decodes strictly and validates by the code of the API server, one line of JSON per object
//	judge json <file.yaml         the same as JSON
//	judge seccomp                 the profile RuntimeDefault of containerd for a process without capabilities, as OCI has it
//
// A line has the object, lists what is wrong with it, and says for workloads which Pod Security Standard their pods meet.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	jsonserializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/apps"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	apps_validation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	core_validation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/networking"
	_ "k8s.io/kubernetes/pkg/apis/networking/install"
	networking_validation "k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/pkg/apis/policy"
	_ "k8s.io/kubernetes/pkg/apis/policy/install"
	policy_validation "k8s.io/kubernetes/pkg/apis/policy/validation"
	"k8s.io/kubernetes/pkg/apis/scheduling"
	_ "k8s.io/kubernetes/pkg/apis/scheduling/install"
	scheduling_validation "k8s.io/kubernetes/pkg/apis/scheduling/validation"
	"k8s.io/kubernetes/pkg/capabilities"
	"k8s.io/pod-security-admission/api"
	pod_security "k8s.io/pod-security-admission/policy"
)

// What is said about one object.
type verdict struct {
	Object map[string]any `json:"object"`
	Errors []string       `json:"errors"`
	// The strictest standard that the pods of a workload meet, and what the next stricter one forbids.
	Level     string   `json:"level,omitempty"`
	Forbidden []string `json:"forbidden,omitempty"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(words []string) error {
	if len(words) != 1 {
		return errors.New("usage: judge objects|json|seccomp")
	}
	switch words[0] {
	case "objects":
		return objects(os.Stdin, os.Stdout)
	case "json":
		text, err := io.ReadAll(os.Stdin)
		if err != nil {
			return err
		}
		converted, err := yaml.ToJSON(text)
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(converted)
		return err
	case "seccomp":
		spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}}
		return json.NewEncoder(os.Stdout).Encode(seccomp.DefaultProfile(spec))
	default:
		return fmt.Errorf("unknown command: %s", words[0])
	}
}

func objects(in io.Reader, out io.Writer) error {
	// As a cluster has it that has any nodes of this kind. Which standard a pod meets is said all the same.
	capabilities.Setup(true, 0)
	scheme := legacyscheme.Scheme
	if err := monitoring.AddToScheme(scheme); err != nil {
		return err
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict)
	strict := jsonserializer.NewSerializerWithOptions(
		jsonserializer.DefaultMetaFactory, scheme, scheme, jsonserializer.SerializerOptions{Yaml: true, Strict: true})
	reader := yaml.NewYAMLReader(bufio.NewReader(in))
	answers := json.NewEncoder(out)
	for {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var object map[string]any
		if err := yaml.Unmarshal(text, &object); err != nil {
			return err
		}
		if len(object) == 0 {
			continue
		}
		found := judge(decoder, strict, text)
		found.Object = object
		if err := answers.Encode(found); err != nil {
			return err
		}
	}
}

func judge(codecs serializer.CodecFactory, strict runtime.Serializer, text []byte) verdict {
	found := verdict{Errors: []string{}}
	object, _, err := strict.Decode(text, nil, nil)
	if err != nil {
		found.Errors = append(found.Errors, err.Error())
		return found
	}
	if _, is := object.(*monitoring.ServiceMonitor); is {
		// There is no validation of this kind beside its fields.
		return found
	}
	template, is := templateOf(object)
	if is {
		found.Level, found.Forbidden = level(template)
	}
	// With the defaults that the API server fills in, without which objects are not valid.
	internal, err := runtime.Decode(codecs.UniversalDecoder(), text)
	if err != nil {
		found.Errors = append(found.Errors, err.Error())
		return found
	}
	if accessor, is := internal.(metav1.Object); is && accessor.GetNamespace() == "" {
		// Which the client fills in.
		accessor.SetNamespace("default")
	}
	for _, wrong := range validate(internal) {
		found.Errors = append(found.Errors, wrong.Error())
	}
	return found
}

func validate(object runtime.Object) field.ErrorList {
	switch object := object.(type) {
	case *apps.Deployment:
		options := pod.GetValidationOptionsFromPodTemplate(&object.Spec.Template, nil)
		return apps_validation.ValidateDeployment(object, options)
	case *apps.DaemonSet:
		options := pod.GetValidationOptionsFromPodTemplate(&object.Spec.Template, nil)
		return apps_validation.ValidateDaemonSet(object, options)
	case *core.Service:
		return core_validation.ValidateServiceCreate(object)
	case *core.ServiceAccount:
		return core_validation.ValidateServiceAccount(object)
	case *core.ConfigMap:
		return core_validation.ValidateConfigMap(object)
	case *core.PersistentVolumeClaim:
		return core_validation.ValidatePersistentVolumeClaim(object, core_validation.ValidationOptionsForPersistentVolumeClaimCreate())
	case *networking.NetworkPolicy:
		return networking_validation.ValidateNetworkPolicy(object, networking_validation.NetworkPolicyValidationOptions{})
	case *networking.Ingress:
		return networking_validation.ValidateIngressCreate(object)
	case *policy.PodDisruptionBudget:
		return policy_validation.ValidatePodDisruptionBudget(object, policy_validation.PodDisruptionBudgetValidationOptions{})
	case *scheduling.PriorityClass:
		object.Namespace = ""
		return scheduling_validation.ValidatePriorityClass(object)
	default:
		return field.ErrorList{field.Invalid(field.NewPath("kind"), fmt.Sprintf("%T", object), "this program has no validation of the kind")}
	}
}

func templateOf(object runtime.Object) (*corev1.PodTemplateSpec, bool) {
	switch object := object.(type) {
	case *appsv1.Deployment:
		return &object.Spec.Template, true
	case *appsv1.DaemonSet:
		return &object.Spec.Template, true
	default:
		return nil, false
	}
}

// The strictest of the Pod Security Standards that pods of a template meet.
func level(template *corev1.PodTemplateSpec) (string, []string) {
	evaluator, err := pod_security.NewEvaluator(pod_security.DefaultChecks(), nil)
	if err != nil {
		return "", []string{err.Error()}
	}
	forbidden := []string{}
	for _, level := range []api.Level{api.LevelRestricted, api.LevelBaseline} {
		at := api.LevelVersion{Level: level, Version: api.LatestVersion()}
		failed := []string{}
		for _, result := range evaluator.EvaluatePod(at, &template.ObjectMeta, &template.Spec) {
			if !result.Allowed {
				failed = append(failed, result.ForbiddenReason+": "+result.ForbiddenDetail)
			}
		}
		if len(failed) == 0 {
			return string(level), forbidden
		}
		forbidden = failed
	}
	return string(api.LevelPrivileged), forbidden
}
