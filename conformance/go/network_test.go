package conformance

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

// The tests run on the host of a fake internet in which every address answers. Addresses in 93.66.0.0/16 and names below
// example.net are denied wherever they are tried, which the fake internet checks at the end; each denial has a twin that
// is allowed.

func withNetwork(config sandbox.NetworkConfig) func(*sandbox.CreateParams) {
	return func(params *sandbox.CreateParams) { params.Network = &config }
}

// reached is one letter for each of the URLs, y where it answers to a program inside and n where not.
func reached(t *testing.T, box *sandbox.Sandbox, urls ...string) string {
	t.Helper()
	authority, err := os.ReadFile(os.Getenv("RINGFENCE_AUTHORITY"))
	must(t, err)
	_, err = box.Files().Write(within(t), "/tmp/authority.pem", authority)
	must(t, err)
	var script strings.Builder
	for _, url := range urls {
		script.WriteString("curl -s -m 10 -o /dev/null --cacert /tmp/authority.pem '" + url + "' && echo -n y || echo -n n\n")
	}
	return outcome(t, box, script.String()).Stdout
}

// update replaces the policy of a running sandbox. The SDK has no function for it, so this is the request itself.
func update(t *testing.T, box *sandbox.Sandbox, body string) int {
	t.Helper()
	url := "https://api." + os.Getenv("E2B_DOMAIN") + "/sandboxes/" + box.ID() + "/network"
	request, err := http.NewRequestWithContext(within(t), http.MethodPut, url, strings.NewReader(body))
	must(t, err)
	request.Header.Set("X-API-Key", os.Getenv("E2B_API_KEY"))
	request.Header.Set("Content-Type", "application/json")
	answer, err := plain.Do(request)
	must(t, err)
	must(t, answer.Body.Close())
	return answer.StatusCode
}

func TestInternetAccessIsOpenUnlessItIsClosed(t *testing.T) {
	open := sandboxFor(t)
	same(t, reached(t, open, "http://93.67.10.1/", "https://www.example.com/", "http://10.9.0.1/"), "yyn")
	no := false
	closed := sandboxFor(t, func(params *sandbox.CreateParams) { params.AllowInternetAccess = &no })
	same(t, reached(t, closed, "http://93.66.10.1/", "https://shut.example.net/"), "nn")
}

func TestAllowedAndDeniedDestinations(t *testing.T) {
	all, some, one := []string{"0.0.0.0/0"}, []string{"93.67.11.0/24", "www.example.com"}, []string{"93.66.0.0/16"}
	few := sandboxFor(t, withNetwork(sandbox.NetworkConfig{DenyOut: &all, AllowOut: &some}))
	same(t, reached(t, few, "http://93.67.11.1/", "https://www.example.com/", "http://93.66.11.1/", "https://www.example.net/"), "yynn")
	most := sandboxFor(t, withNetwork(sandbox.NetworkConfig{DenyOut: &one}))
	same(t, reached(t, most, "http://93.67.12.1/", "http://93.66.12.1/"), "yn")
}

func TestAPolicyIsChangedWhileTheSandboxRuns(t *testing.T) {
	box := sandboxFor(t)
	urls := []string{"http://93.67.13.1/", "http://93.67.13.2/"}
	same(t, reached(t, box, urls...), "yy")
	for _, step := range []struct {
		body   string
		status int
		want   string
	}{
		{`{"denyOut": ["93.67.13.1"]}`, http.StatusNoContent, "ny"},
		{`{"denyOut": ["0.0.0.0/0"], "allowOut": ["93.67.13.1"]}`, http.StatusNoContent, "yn"},
		{`{"denyOut": ["example.net"]}`, http.StatusBadRequest, "yn"},
		{`{"allow_internet_access": false}`, http.StatusNoContent, "nn"},
		{`{}`, http.StatusNoContent, "yy"},
	} {
		same(t, update(t, box, step.body), step.status)
		same(t, reached(t, box, urls...), step.want)
	}
}

func TestTheHostThatAServerInsideSees(t *testing.T) {
	mask := "localhost:${PORT}"
	box := sandboxFor(t, withNetwork(sandbox.NetworkConfig{MaskRequestHost: &mask}))
	server, err := os.ReadFile(os.Getenv("RINGFENCE_PROGRAMS") + "/http_server.py")
	must(t, err)
	_, err = box.Files().Write(within(t), "/tmp/http_server.py", server)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	_, err = box.Commands().Start(ctx, "exec python3 /tmp/http_server.py 127.0.0.1 8000")
	must(t, err)
	var seen struct{ Headers map[string]string }
	until(t, "the server answers", func() bool {
		answer, err := plain.Get("https://" + box.GetHost(8000))
		must(t, err)
		defer answer.Body.Close()
		return answer.StatusCode == http.StatusOK && json.NewDecoder(answer.Body).Decode(&seen) == nil
	})
	if host := seen.Headers["Host"] + seen.Headers["host"]; host != "localhost:8000" {
		t.Fatalf("%q in %v", host, seen.Headers)
	}
}
