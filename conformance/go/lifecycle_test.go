package conformance

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

func asAPIError(err error, into **sandbox.APIError) bool {
	return errors.As(err, into)
}

func wantStatus(t *testing.T, err error, status int) {
	t.Helper()
	var failed *sandbox.APIError
	if !asAPIError(err, &failed) || failed.StatusCode != status {
		t.Fatalf("got %v, want status %d", err, status)
	}
}

func TestASandboxTellsWhatItIs(t *testing.T) {
	ctx := within(t)
	envs := map[string]string{"COLOUR": "green"}
	metadata := sandbox.Metadata{"a key": "é=&,"}
	box := sandboxFor(t, func(params *sandbox.CreateParams) {
		params.EnvVars = &envs
		params.Metadata = &metadata
	})
	info, err := box.WaitForReady(ctx, sandbox.WithPollInterval(20*time.Millisecond))
	must(t, err)
	same(t, info.SandboxID, box.ID())
	same(t, info.State, sandbox.StateRunning)
	same(t, (*info.Metadata)["a key"], "é=&,")
	if info.CPUCount <= 0 || info.MemoryMB <= 0 || info.DiskSizeMB <= 0 {
		t.Fatalf("%+v", info)
	}
	left := info.EndAt.Sub(info.StartedAt)
	if left < 118*time.Second || left > 122*time.Second {
		t.Fatalf("ends after %v", left)
	}
	running, err := box.IsRunning(ctx)
	must(t, err)
	same(t, running, true)
	same(t, box.GetHost(8080), fmt.Sprintf("8080-%s.%s", box.ID(), *box.Domain()))
	same(t, outcome(t, box, "echo $COLOUR").Stdout, "green\n")
	same(t, box.TemplateID(), info.TemplateID)
	same(t, *box.Alias(), "base")
}

func TestCreatingAndWaiting(t *testing.T) {
	ctx := within(t)
	timeout := int32(120)
	polls := 0
	box, info, err := client.CreateAndWait(ctx, sandbox.CreateParams{TemplateID: "base", Timeout: &timeout},
		sandbox.WithPollInterval(20*time.Millisecond), sandbox.WithBackoff(1.5, time.Second), sandbox.WithOnPoll(func(int) { polls++ }))
	must(t, err)
	defer func() { must(t, box.Kill(ctx)) }()
	same(t, info.SandboxID, box.ID())
	same(t, polls > 0, true)
}

func TestTheListAndItsFilters(t *testing.T) {
	ctx := within(t)
	mark := fmt.Sprint(time.Now().UnixNano())
	made := map[string]bool{}
	for range 3 {
		metadata := sandbox.Metadata{"mark": mark}
		box := sandboxFor(t, func(params *sandbox.CreateParams) { params.Metadata = &metadata })
		made[box.ID()] = true
	}
	filter := "mark=" + mark
	listed, err := client.List(ctx, &sandbox.ListParams{Metadata: &filter})
	must(t, err)
	same(t, len(listed), 3)
	for _, item := range listed {
		same(t, made[item.SandboxID], true)
		same(t, *item.Alias, "base")
	}
	states := []sandbox.SandboxState{sandbox.StatePaused}
	listed, err = client.List(ctx, &sandbox.ListParams{Metadata: &filter, State: &states})
	must(t, err)
	same(t, len(listed), 0)
	limit := int32(2)
	listed, err = client.List(ctx, &sandbox.ListParams{Metadata: &filter, Limit: &limit})
	must(t, err)
	same(t, len(listed), 2)
}

func TestConnectingFindsTheSameSandbox(t *testing.T) {
	box := sandboxFor(t)
	outcome(t, box, "echo kept > kept")
	again, err := client.Connect(within(t), box.ID(), sandbox.ConnectParams{Timeout: 120})
	must(t, err)
	same(t, again.ID(), box.ID())
	same(t, outcome(t, again, "cat kept").Stdout, "kept\n")
}

func TestDeadlines(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	must(t, box.SetTimeout(ctx, 10*time.Minute))
	info, err := box.GetInfo(ctx)
	must(t, err)
	if left := time.Until(info.EndAt); left < 590*time.Second {
		t.Fatalf("ends in %v", left)
	}
	seconds := 900
	must(t, box.Refresh(ctx, sandbox.RefreshParams{Duration: &seconds}))
	info, err = box.GetInfo(ctx)
	must(t, err)
	if left := time.Until(info.EndAt); left < 890*time.Second {
		t.Fatalf("ends in %v", left)
	}
	must(t, box.SetTimeout(ctx, time.Second))
	until(t, "the deadline ended the sandbox", func() bool {
		running, err := box.IsRunning(ctx)
		return err == nil && !running
	})
}

func TestKilledMeansGone(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	must(t, box.Kill(ctx))
	running, err := box.IsRunning(ctx)
	must(t, err)
	same(t, running, false)
	_, err = box.GetInfo(ctx)
	wantStatus(t, err, 404)
	wantStatus(t, box.Kill(ctx), 404)
	_, err = client.Connect(ctx, box.ID(), sandbox.ConnectParams{Timeout: 60})
	wantStatus(t, err, 404)
	result, err := box.Commands().Run(ctx, "true")
	if err == nil && (result.ExitCode != -1 || result.Error == "") {
		t.Fatalf("%+v", result)
	}
}

func TestRefusals(t *testing.T) {
	ctx := within(t)
	_, err := client.Create(ctx, sandbox.CreateParams{TemplateID: "no-such-template"})
	wantStatus(t, err, 404)
	if !strings.Contains(err.Error(), "no-such-template") {
		t.Fatal(err)
	}
	long := int32(3600 * 24 * 365)
	_, err = client.Create(ctx, sandbox.CreateParams{TemplateID: "base", Timeout: &long})
	wantStatus(t, err, 400)
}

func TestLogsAndMetrics(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	outcome(t, box, "true")
	var samples []sandbox.SandboxMetric
	until(t, "it was measured", func() bool {
		found, err := box.GetMetrics(ctx, nil)
		must(t, err)
		samples = found
		return len(found) > 0
	})
	info, err := box.GetInfo(ctx)
	must(t, err)
	same(t, samples[0].CPUCount, info.CPUCount)
	same(t, samples[0].MemTotal, int64(info.MemoryMB)<<20)
	same(t, samples[0].Timestamp.Unix(), samples[0].TimestampUnix)
	later := time.Now().Unix() + 60
	samples, err = box.GetMetrics(ctx, &sandbox.GetMetricsParams{Start: &later})
	must(t, err)
	same(t, len(samples), 0)
	several, err := client.GetSandboxesMetrics(ctx, &sandbox.GetSandboxesMetricsParams{SandboxIds: []string{box.ID()}})
	must(t, err)
	same(t, several.Sandboxes[box.ID()].MemTotal, int64(info.MemoryMB)<<20)

	limit := int32(1)
	logs, err := box.GetLogs(ctx, &sandbox.GetLogsParams{Limit: &limit})
	must(t, err)
	same(t, len(logs.Logs), 1)
	same(t, len(logs.LogEntries), 1)
	same(t, string(logs.LogEntries[0].Level), "info")
	same(t, strings.Contains(logs.LogEntries[0].Message, "started"), true)
}

// The SDK sends a key of its own with every create; one that a caller names makes creates one.
func TestACreateWithAKey(t *testing.T) {
	key := fmt.Sprint("go-", time.Now().UnixNano())
	named := func(params *sandbox.CreateParams) { params.IdempotencyKey = key }
	first := sandboxFor(t, named)
	again, err := client.Create(within(t), sandbox.CreateParams{TemplateID: "base", Timeout: seconds(120), IdempotencyKey: key})
	must(t, err)
	same(t, again.ID(), first.ID())
	_, err = client.Create(within(t), sandbox.CreateParams{TemplateID: "base", Timeout: seconds(60), IdempotencyKey: key})
	wantStatus(t, err, 409)
	if one, two := sandboxFor(t), sandboxFor(t); one.ID() == two.ID() {
		t.Fatal("two creates made one sandbox")
	}
}

func seconds(n int32) *int32 {
	return &n
}
