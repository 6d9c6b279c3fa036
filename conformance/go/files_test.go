// Files and directories: the SDK signs in its own way (hexadecimal, with a lifetime instead of a moment),
// uploads several files without any signature, and looks at every file after writing it.
package conformance

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

func TestWriteAndRead(t *testing.T) {
	ctx := within(t)
	files := sandboxFor(t).Files()
	info, err := files.Write(ctx, "/home/user/deep/a é.txt", []byte("héllo\n"))
	must(t, err)
	same(t, info.Path, "/home/user/deep/a é.txt")
	same(t, fmt.Sprint(info.Name, info.Type, info.Size, info.Permissions, info.Owner), "a é.txtfile7-rw-r--r--user")
	text, err := files.ReadText(ctx, "/home/user/deep/a é.txt")
	must(t, err)
	same(t, text, "héllo\n")
	stream, err := files.ReadStream(ctx, "deep/a é.txt")
	must(t, err)
	data, err := io.ReadAll(stream)
	must(t, err)
	must(t, stream.Close())
	same(t, string(data), "héllo\n")
	_, err = files.Read(ctx, "/no/such/file")
	wantStatus(t, err, 404)
	_, err = files.Read(ctx, "/tmp")
	wantStatus(t, err, 400)
	info, err = files.Write(ctx, "/root/secret", []byte("x"), sandbox.WithUser("root"))
	must(t, err)
	same(t, info.Owner, "root")
}

func TestSixteenMegabytes(t *testing.T) {
	ctx := within(t)
	files := sandboxFor(t).Files()
	data := make([]byte, 16<<20)
	_, err := rand.Read(data)
	must(t, err)
	_, err = files.Write(ctx, "large", data)
	must(t, err)
	got, err := files.Read(ctx, "large")
	must(t, err)
	same(t, sha256.Sum256(got), sha256.Sum256(data))
}

func TestSeveralFilesWithoutASignature(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	entries := []sandbox.WriteEntry{
		{Path: "/home/user/many/one", Data: []byte("ONE")},
		{Path: "/home/user/many/two", Data: []byte("TWO")},
	}
	infos, err := box.Files().WriteFiles(ctx, entries)
	must(t, err)
	same(t, len(infos), 2)
	same(t, infos[1].Path, "/home/user/many/two")
	same(t, outcome(t, box, "cat many/one many/two").Stdout, "ONETWO")
}

// Only the agent of a secured sandbox asks for a signature.
func secured(params *sandbox.CreateParams) {
	yes := true
	params.Secure = &yes
}

func TestSignedLinks(t *testing.T) {
	box := sandboxFor(t, secured)
	outcome(t, box, "echo -n by link > linked")
	// Only the form of the link is the SDK's; the request is anyone's.
	get := func(link string) int {
		t.Helper()
		request, err := http.NewRequestWithContext(within(t), http.MethodGet, link, nil)
		must(t, err)
		answer, err := plain.Do(request)
		must(t, err)
		defer answer.Body.Close()
		_, err = io.Copy(io.Discard, answer.Body)
		must(t, err)
		return answer.StatusCode
	}
	link := box.DownloadURL("/home/user/linked", sandbox.WithSignatureExpiration(60))
	same(t, get(link), 200)
	same(t, get(strings.Replace(link, "linked", "other", 1)), 401)
	same(t, get(strings.Replace(link, "signature_expiration=60", "signature_expiration=90", 1)), 401)
	same(t, get(strings.Replace(link, "username=user", "username=root", 1)), 401)
}

func TestAnUploadByLink(t *testing.T) {
	box := sandboxFor(t, secured)
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, err := form.CreateFormFile("file", "secret")
	must(t, err)
	_, err = part.Write([]byte("by link"))
	must(t, err)
	must(t, form.Close())
	post := func(link string) int {
		t.Helper()
		request, err := http.NewRequestWithContext(within(t), http.MethodPost, link, bytes.NewReader(body.Bytes()))
		must(t, err)
		request.Header.Set("Content-Type", form.FormDataContentType())
		answer, err := plain.Do(request)
		must(t, err)
		defer answer.Body.Close()
		_, err = io.Copy(io.Discard, answer.Body)
		must(t, err)
		return answer.StatusCode
	}
	link := box.UploadURL("/root/secret", sandbox.WithFileUser("root"))
	same(t, post(link), 200)
	same(t, outcome(t, box, "stat -c %U /root/secret; cat /root/secret", sandbox.WithCommandUser("root")).Stdout, "root\nby link")
	same(t, post(strings.Replace(link, "secret", "other", 1)), 401)
	same(t, post(box.DownloadURL("/root/secret", sandbox.WithFileUser("root"))), 401)
	// A lifetime in seconds from the moment of the signature, not a moment.
	same(t, strings.Contains(link, "signature_expiration=300"), true)
}

func TestDirectories(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	files := box.Files()
	made, err := files.MakeDir(ctx, "/home/user/top/sub")
	must(t, err)
	same(t, made.Type, sandbox.FileTypeDirectory)
	outcome(t, box, "echo x > top/b; echo x > top/a; echo x > top/sub/deep")
	names := func(depth uint32) string {
		t.Helper()
		entries, err := files.List(ctx, "/home/user/top", sandbox.WithDepth(depth))
		must(t, err)
		var found []string
		for _, entry := range entries {
			found = append(found, strings.TrimPrefix(entry.Path, "/home/user/top/"))
		}
		return strings.Join(found, " ")
	}
	same(t, names(1), "a b sub")
	same(t, names(2), "a b sub sub/deep")
	moved, err := files.Rename(ctx, "/home/user/top/a", "/home/user/other/place")
	must(t, err)
	same(t, moved.Path, "/home/user/other/place")
	exists, err := files.Exists(ctx, "/home/user/top/a")
	must(t, err)
	same(t, exists, false)
	must(t, files.Remove(ctx, "/home/user/top"))
	exists, err = files.Exists(ctx, "/home/user/top")
	must(t, err)
	same(t, exists, false)
	info, err := files.GetInfo(ctx, "/tmp")
	must(t, err)
	same(t, info.Permissions, "dtrwxrwxrwx")
	entries, err := files.List(ctx, "~", sandbox.WithListUser("root"))
	must(t, err)
	for _, entry := range entries {
		same(t, strings.HasPrefix(entry.Path, "/root/"), true)
	}
}
