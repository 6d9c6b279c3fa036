// The Go SDK against a running platform, with its binary messages and over TLS, which is all that it speaks to sandboxes.
//
// RINGFENCE_ADDRESS is where the platform listens; E2B_API_KEY, E2B_DOMAIN and SSL_CERT_FILE are what it hands out for
// HTTPS. Names below the domain need no resolver: every connection goes to that address, as it would after resolution.
package conformance

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

var (
	client *sandbox.Client
	// plain makes requests that are not the SDK's, by the same way.
	plain *http.Client
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	address := os.Getenv("RINGFENCE_ADDRESS")
	authority, err := os.ReadFile(os.Getenv("SSL_CERT_FILE"))
	if err != nil {
		return 1, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return 1, fmt.Errorf("%s holds no certificate", os.Getenv("SSL_CERT_FILE"))
	}
	dialer := &net.Dialer{}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, address)
		},
		TLSClientConfig:     &tls.Config{RootCAs: roots},
		ForceAttemptHTTP2:   true,
		MaxIdleConnsPerHost: 64,
	}
	defer transport.CloseIdleConnections()
	plain = &http.Client{Transport: transport}
	none := 0
	made, err := sandbox.NewClient(&sandbox.Config{
		APIKey:     os.Getenv("E2B_API_KEY"),
		Endpoint:   "https://api." + os.Getenv("E2B_DOMAIN"),
		HTTPClient: plain,
		RetryMax:   &none,
	})
	if err != nil {
		return 1, err
	}
	client = made
	return m.Run(), nil
}

// patience is so many seconds on the machine for which deadlines were written, and longer where it is slower.
func patience(seconds float64) time.Duration {
	factor, err := strconv.ParseFloat(os.Getenv("RINGFENCE_PATIENCE"), 64)
	if err != nil {
		factor = 1
	}
	return time.Duration(seconds * factor * float64(time.Second))
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience(60))
	t.Cleanup(cancel)
	return ctx
}

// sandboxFor makes a sandbox that ends with the test.
func sandboxFor(t *testing.T, change ...func(*sandbox.CreateParams)) *sandbox.Sandbox {
	t.Helper()
	timeout := int32(120)
	params := sandbox.CreateParams{TemplateID: "base", Timeout: &timeout}
	for _, apply := range change {
		apply(&params)
	}
	box, err := client.Create(within(t), params)
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience(30))
		defer cancel()
		var failed *sandbox.APIError
		if err := box.Kill(ctx); err != nil && !(asAPIError(err, &failed) && failed.StatusCode == 404) {
			t.Errorf("kill %s: %v", box.ID(), err)
		}
	})
	return box
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func same[T comparable](t *testing.T, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("got %v, want %v", got, want)
	}
}

// until waits for something that another process does.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience(20))
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("still not so: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// collected is output that arrives on another goroutine.
type collected struct {
	mutex sync.Mutex
	data  bytes.Buffer
}

func (c *collected) add(data []byte) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.data.Write(data)
}

func (c *collected) text() string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.data.String()
}

// outcome is that of a command that must at least have been started and ended.
func outcome(t *testing.T, box *sandbox.Sandbox, command string, options ...sandbox.CommandOption) *sandbox.CommandResult {
	t.Helper()
	result, err := box.Commands().Run(within(t), command, options...)
	must(t, err)
	return result
}
