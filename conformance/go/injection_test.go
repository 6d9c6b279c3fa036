package conformance

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/qiniu/go-sdk/v7/auth"
	"github.com/qiniu/go-sdk/v7/sandbox"
)

// signedClient signs requests about rules, with the given secret key, and sends the API key as well.
func signedClient(t *testing.T, secret string) *sandbox.Client {
	t.Helper()
	none := 0
	made, err := sandbox.NewClient(&sandbox.Config{
		APIKey:      os.Getenv("E2B_API_KEY"),
		Credentials: auth.New(os.Getenv("RINGFENCE_ACCESS_KEY"), secret),
		Endpoint:    "https://api." + os.Getenv("E2B_DOMAIN"),
		HTTPClient:  plain,
		RetryMax:    &none,
	})
	must(t, err)
	return made
}

func TestInjectionRules(t *testing.T) {
	signed := signedClient(t, os.Getenv("RINGFENCE_SECRET_KEY"))
	url, key, token := "https://api.example.com/v1/*", "sk-of-the-go-client", "ghp_of_the_go_client"
	headers := map[string]string{"Authorization": "Bearer a-value-of-a-header"}
	conditions := map[string]string{"tenant": "one"}
	http := sandbox.HTTPInjection{BaseURL: url, Headers: &headers, IfHeaders: &conditions, IfQueries: &conditions}
	rule, err := signed.CreateInjectionRule(within(t), sandbox.CreateInjectionRuleParams{
		Name:      "from go",
		Injection: sandbox.InjectionSpec{HTTP: &http},
	})
	must(t, err)
	defer func() { must(t, signed.DeleteInjectionRule(within(t), rule.RuleID)) }()
	// Its owner sees everything but keys and tokens.
	if rule.Injection.HTTP == nil || !reflect.DeepEqual(*rule.Injection.HTTP, http) {
		t.Fatalf("got %+v", rule.Injection.HTTP)
	}
	_, err = signed.CreateInjectionRule(within(t), sandbox.CreateInjectionRuleParams{
		Name:      "from go",
		Injection: sandbox.InjectionSpec{HTTP: &http},
	})
	wantStatus(t, err, 409)
	_, err = signedClient(t, "another").ListInjectionRules(within(t))
	wantStatus(t, err, 401)
	_, err = signed.GetInjectionRule(within(t), "rule_of_nobody")
	wantStatus(t, err, 404)

	name := "renamed"
	renamed, err := signed.UpdateInjectionRule(within(t), rule.RuleID, sandbox.UpdateInjectionRuleParams{Name: &name})
	must(t, err)
	same(t, renamed.Name, name)
	if renamed.Injection.HTTP == nil || !reflect.DeepEqual(*renamed.Injection.HTTP, http) {
		t.Fatalf("got %+v", renamed.Injection.HTTP)
	}
	// The injection is replaced as a whole, and by one of every type.
	for _, spec := range []sandbox.InjectionSpec{
		{OpenAI: &sandbox.OpenAIInjection{APIKey: &key}},
		{Anthropic: &sandbox.AnthropicInjection{APIKey: &key}},
		{Gemini: &sandbox.GeminiInjection{APIKey: &key, BaseURL: &url}},
		{Qiniu: &sandbox.QiniuInjection{APIKey: &key}},
		{Github: &sandbox.GithubInjection{Token: &token}},
	} {
		spec := spec
		changed, err := signed.UpdateInjectionRule(within(t), rule.RuleID, sandbox.UpdateInjectionRuleParams{Injection: &spec})
		must(t, err)
		same(t, changed.Name, name)
		same(t, changed.Injection.HTTP == nil, true)
	}
	read, err := signed.GetInjectionRule(within(t), rule.RuleID)
	must(t, err)
	if read.Injection.Github == nil || read.Injection.Github.Token == nil || *read.Injection.Github.Token != "ghp_****" {
		t.Fatalf("got %+v", read.Injection.Github)
	}
	all, err := signed.ListInjectionRules(within(t))
	must(t, err)
	found := false
	for _, one := range all {
		found = found || one.RuleID == rule.RuleID
	}
	same(t, found, true)
}

func TestInjectionsOfASandbox(t *testing.T) {
	signed := signedClient(t, os.Getenv("RINGFENCE_SECRET_KEY"))
	key, token := "sk-of-the-go-client", "ghp_of_the_go_client"
	rule, err := signed.CreateInjectionRule(within(t), sandbox.CreateInjectionRuleParams{
		Name:      "of a sandbox",
		Injection: sandbox.InjectionSpec{Anthropic: &sandbox.AnthropicInjection{APIKey: &key}},
	})
	must(t, err)
	defer func() { must(t, signed.DeleteInjectionRule(within(t), rule.RuleID)) }()
	headers := map[string]string{"Authorization": "Bearer a-value-of-a-header"}
	injections := []sandbox.SandboxInjectionSpec{
		{ByID: &rule.RuleID},
		{HTTP: &sandbox.HTTPInjection{BaseURL: "https://api.example.com", Headers: &headers}},
		{Github: &sandbox.GithubInjection{Token: &token}},
	}
	box := sandboxFor(t, func(params *sandbox.CreateParams) { params.Injections = &injections })
	shown, err := box.GetInjections(within(t))
	must(t, err)
	same(t, len(shown), 3)
	same(t, *shown[0].ByID, rule.RuleID)
	same(t, (*shown[1].HTTP.Headers)["Authorization"], "Bear****")
	same(t, *shown[2].Github.Token, "ghp_****")

	must(t, box.UpdateGitHubToken(within(t), "other_token_of_go"))
	shown, err = box.GetInjections(within(t))
	must(t, err)
	same(t, *shown[2].Github.Token, "othe****")
	must(t, box.UpdateInjections(within(t), injections[:1]))
	shown, err = box.GetInjections(within(t))
	must(t, err)
	same(t, len(shown), 1)
	wantStatus(t, box.UpdateGitHubToken(within(t), "ghp_for_nothing"), 400)

	nobody := "rule_of_nobody"
	timeout := int32(60)
	_, err = client.Create(within(t), sandbox.CreateParams{
		TemplateID: "base",
		Timeout:    &timeout,
		Injections: &[]sandbox.SandboxInjectionSpec{{ByID: &nobody}},
	})
	wantStatus(t, err, 400)
	same(t, strings.Contains(err.Error(), nobody), true)
}
