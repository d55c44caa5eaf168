// Command pause holds a pod's namespaces: it waits to be told to end and reaps nobody.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	// Ignored, the kernel reaps orphans of a shared PID namespace by itself.
	signal.Ignore(syscall.SIGCHLD)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
