package conformance

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

// templateName is the name of a template that is deleted when the sandboxes of the test have ended.
func templateName(t *testing.T) string {
	t.Helper()
	name := fmt.Sprintf("go%x", time.Now().UnixNano())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience(30))
		defer cancel()
		var failed *sandbox.APIError
		if err := client.DeleteTemplate(ctx, name); err != nil && !(asAPIError(err, &failed) && failed.StatusCode == 404) {
			t.Errorf("delete %s: %v", name, err)
		}
	})
	return name
}

func pointer[T any](value T) *T { return &value }

// archive is a tar archive with one file.
func archive(t *testing.T, name, text string) []byte {
	t.Helper()
	var data bytes.Buffer
	writer := tar.NewWriter(&data)
	must(t, writer.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)), Format: tar.FormatPAX}))
	_, err := writer.Write([]byte(text))
	must(t, err)
	must(t, writer.Close())
	return data.Bytes()
}

func TestATemplateFromItsFirstBuildToItsEnd(t *testing.T) {
	ctx := within(t)
	name := templateName(t)
	made, err := client.CreateTemplate(ctx, sandbox.CreateTemplateParams{
		Name: pointer(name + ":v1"), Tags: &[]string{"v2", "default"}, CPUCount: pointer(int32(1)), MemoryMB: pointer(int32(512)),
	})
	must(t, err)
	same(t, strings.Join(made.Aliases, ","), name)
	same(t, strings.Join(made.Names, ","), "default/"+name)
	same(t, strings.Join(made.Tags, ","), "v1,v2,default")
	same(t, made.Public, false)

	data := archive(t, "file.txt", "copied\n")
	sum := sha256.Sum256(data)
	hash := hex.EncodeToString(sum[:])
	files, err := client.GetTemplateFiles(ctx, made.TemplateID, hash)
	must(t, err)
	same(t, files.Present, false)
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, *files.URL, bytes.NewReader(data))
	must(t, err)
	answer, err := plain.Do(request)
	must(t, err)
	must(t, answer.Body.Close())
	same(t, answer.StatusCode, 200)
	files, err = client.GetTemplateFiles(ctx, made.TemplateID, hash)
	must(t, err)
	same(t, files.Present, true)

	status, err := client.GetTemplateBuildStatus(ctx, made.TemplateID, made.BuildID, nil)
	must(t, err)
	same(t, status.Status, sandbox.BuildStatusWaiting)
	start := sandbox.StartTemplateBuildParams{
		FromTemplate: pointer("base"),
		Steps: &[]sandbox.TemplateStep{
			{Type: "COPY", Args: &[]string{"file.txt", "/srv/file.txt", "root", "0640"}, FilesHash: &hash},
			{Type: "RUN", Args: &[]string{"id -un > ~/by; echo said; echo wrong >&2"}, Force: pointer(true)},
			{Type: "WORKDIR", Args: &[]string{"/srv/app"}},
		},
		StartCmd: pointer("exec python3 -m http.server 8000"),
		ReadyCmd: pointer("curl -sf -o /dev/null localhost:8000"),
		Force:    pointer(false),
	}
	must(t, client.StartTemplateBuild(ctx, made.TemplateID, made.BuildID, start))
	wantStatus(t, client.StartTemplateBuild(ctx, made.TemplateID, made.BuildID, start), 400)
	polls := 0
	info, err := client.WaitForBuild(ctx, made.TemplateID, made.BuildID,
		sandbox.WithPollInterval(100*time.Millisecond), sandbox.WithOnPoll(func(int) { polls++ }))
	must(t, err)
	same(t, info.Status, sandbox.BuildStatusReady)
	if polls == 0 {
		t.Fatal("nothing was asked")
	}

	box := sandboxFor(t, func(params *sandbox.CreateParams) { params.TemplateID = name + ":v2" })
	result := outcome(t, box, "pwd; cat ~/by; stat -c '%U %a' /srv/file.txt; curl -sf -o /dev/null localhost:8000; nproc")
	same(t, result.Stdout, "/srv/app\nuser\nroot 640\n1\n")

	// The log, in both directions and by level.
	all, err := client.GetTemplateBuildLogs(ctx, made.TemplateID, made.BuildID, nil)
	must(t, err)
	backward, forward := sandbox.LogsDirectionBackward, sandbox.LogsDirectionForward
	last, err := client.GetTemplateBuildLogs(ctx, made.TemplateID, made.BuildID, &sandbox.GetBuildLogsParams{
		Direction: &backward, Limit: pointer(int32(3)), Source: pointer(sandbox.LogsSourcePersistent), Level: pointer(sandbox.LogLevelInfo),
	})
	must(t, err)
	same(t, len(last.Logs), 3)
	same(t, last.Logs[0].Message, all.Logs[len(all.Logs)-1].Message)
	from := all.Logs[2].Timestamp.UnixMilli()
	later, err := client.GetTemplateBuildLogs(ctx, made.TemplateID, made.BuildID, &sandbox.GetBuildLogsParams{
		Direction: &forward, Cursor: &from,
	})
	must(t, err)
	for _, entry := range later.Logs {
		if entry.Timestamp.UnixMilli() < from {
			t.Fatalf("%v is before %d", entry, from)
		}
	}
	said := false
	for _, entry := range all.Logs {
		said = said || entry.Step != nil && *entry.Step == "2" && strings.HasSuffix(entry.Message, "[stdout]: said")
	}
	same(t, said, true)
	errors, err := client.GetTemplateBuildStatus(ctx, made.TemplateID, made.BuildID, &sandbox.GetBuildStatusParams{
		LogsOffset: pointer(int32(1)), Limit: pointer(int32(100)), Level: pointer(sandbox.LogLevelError),
	})
	must(t, err)
	same(t, len(errors.Logs), 0)

	// Tags, names and visibility.
	assigned, err := client.AssignTemplateTags(ctx, sandbox.ManageTagsParams{Target: name + ":v1", Tags: []string{"stable"}})
	must(t, err)
	same(t, assigned.BuildID, made.BuildID)
	same(t, strings.Join(assigned.Tags, ","), "stable")
	must(t, client.DeleteTemplateTags(ctx, sandbox.DeleteTagsParams{Name: name, Tags: []string{"v1", "stable"}}))
	_, err = client.AssignTemplateTags(ctx, sandbox.ManageTagsParams{Target: name + ":v1", Tags: []string{"x"}})
	wantStatus(t, err, 404)
	wantStatus(t, client.DeleteTemplateTags(ctx, sandbox.DeleteTagsParams{Name: name, Tags: []string{"default"}}), 400)
	alias, err := client.GetTemplateByAlias(ctx, name)
	must(t, err)
	same(t, alias.TemplateID, made.TemplateID)
	must(t, client.UpdateTemplate(ctx, made.TemplateID, sandbox.UpdateTemplateParams{Public: pointer(true)}))

	// Another build, by the oldest of the requests, which steps of the newest start.
	again, err := client.RebuildTemplate(ctx, made.TemplateID, sandbox.RebuildTemplateParams{
		Dockerfile: "FROM base", CPUCount: pointer(int32(2)), MemoryMB: pointer(int32(1024)),
	})
	must(t, err)
	same(t, again.TemplateID, made.TemplateID)
	must(t, client.StartTemplateBuild(ctx, again.TemplateID, again.BuildID, sandbox.StartTemplateBuildParams{
		FromTemplate: pointer(name), Steps: &[]sandbox.TemplateStep{{Type: "RUN", Args: &[]string{"exit 4"}}},
	}))
	failed, err := client.WaitForBuild(ctx, again.TemplateID, again.BuildID, sandbox.WithPollInterval(50*time.Millisecond))
	if err == nil && failed.Status != sandbox.BuildStatusError {
		t.Fatalf("%+v", failed)
	}
	shown, err := client.GetTemplate(ctx, made.TemplateID, &sandbox.GetTemplateParams{Limit: pointer(int32(10))})
	must(t, err)
	same(t, shown.Public, true)
	same(t, len(shown.Builds), 2)
	same(t, shown.Builds[0].Status, sandbox.BuildStatusError)
	same(t, shown.Builds[1].Status, sandbox.BuildStatusReady)
	same(t, shown.Builds[1].CPUCount, 1)
	same(t, shown.SpawnCount > 0, true)

	must(t, box.Kill(ctx))
	must(t, client.DeleteTemplate(ctx, made.TemplateID))
	_, err = client.GetTemplate(ctx, made.TemplateID, nil)
	wantStatus(t, err, 404)
	_, err = client.GetTemplateByAlias(ctx, name)
	wantStatus(t, err, 404)
}

func TestTemplatesAreListed(t *testing.T) {
	ctx := within(t)
	defaults, err := client.ListDefaultTemplates(ctx)
	must(t, err)
	same(t, strings.Join(defaults[0].Aliases, ","), "base")
	same(t, defaults[0].BuildStatus, sandbox.BuildStatusReady)
	all, err := client.ListTemplates(ctx, nil)
	must(t, err)
	same(t, all[0].TemplateID, defaults[0].TemplateID)
	same(t, all[0].CPUCount > 0 && all[0].MemoryMB > 0 && all[0].DiskSizeMB > 0, true)
	_, err = client.ListTemplates(ctx, &sandbox.ListTemplatesParams{TeamID: pointer("another")})
	wantStatus(t, err, 400)
}

func TestCredentialsOfRegistriesAreSentAsTheyAre(t *testing.T) {
	ctx := within(t)
	name := templateName(t)
	made, err := client.CreateTemplate(ctx, sandbox.CreateTemplateParams{Alias: &name})
	must(t, err)
	start := func(registry string) error {
		raw := json.RawMessage(registry)
		return client.StartTemplateBuild(ctx, made.TemplateID, made.BuildID, sandbox.StartTemplateBuildParams{
			FromImage: pointer("missing-registry.example.com/a/b"), FromImageRegistry: &raw,
		})
	}
	wantStatus(t, start(`{"type": "registry", "username": "u"}`), 400)
	wantStatus(t, start(`{"type": "other"}`), 400)
	must(t, start(`{"type": "registry", "username": "u", "password": "p"}`))
	info, err := client.WaitForBuild(ctx, made.TemplateID, made.BuildID, sandbox.WithPollInterval(100*time.Millisecond))
	if err == nil && info.Status != sandbox.BuildStatusError {
		t.Fatalf("%+v", info)
	}
}
