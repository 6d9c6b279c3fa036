package conformance

import (
	"fmt"
	"testing"

	"github.com/qiniu/go-sdk/v7/sandbox"
)

func TestAWatch(t *testing.T) {
	ctx := within(t)
	box := sandboxFor(t)
	_, err := box.Files().MakeDir(ctx, "/home/user/dir")
	must(t, err)
	watch, err := box.Files().WatchDir(ctx, "/home/user/dir", sandbox.WithRecursive(true), sandbox.WithWatchUser("user"))
	must(t, err)
	outcome(t, box, "mkdir dir/sub && echo x > dir/file && rm dir/file")
	wanted := map[string]bool{"create sub": true, "create file": true, "write file": true, "remove file": true}
	for len(wanted) > 0 {
		select {
		case event, open := <-watch.Events():
			if !open {
				t.Fatalf("ended before %v: %v", wanted, watch.Err())
			}
			delete(wanted, fmt.Sprintf("%s %s", event.Type, event.Name))
		case <-ctx.Done():
			t.Fatalf("not heard: %v", wanted)
		}
	}
	watch.Stop()
	must(t, watch.Err())
}
