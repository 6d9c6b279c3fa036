// A server that tells each connection how many there were, after a round over a connection that it keeps to itself.
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"
)

func check(err error) {
	if err != nil {
		fmt.Println("broken", err)
		os.Exit(1)
	}
}

func echo(listener net.Listener) {
	conn, err := listener.Accept()
	check(err)
	lines := bufio.NewReader(conn)
	for {
		line, err := lines.ReadString('\n')
		check(err)
		_, err = conn.Write([]byte(line))
		check(err)
	}
}

func main() {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	go echo(inner)
	own, err := net.Dial("tcp", inner.Addr().String())
	check(err)
	answers := bufio.NewReader(own)
	var ticks atomic.Int64
	for range [8]int{} {
		go func() {
			for {
				ticks.Add(1)
				time.Sleep(time.Millisecond)
			}
		}()
	}
	listener, err := net.Listen("tcp", "127.0.0.1:7000")
	check(err)
	fmt.Println("ready")
	for count := 1; ; count++ {
		conn, err := listener.Accept()
		check(err)
		_, err = fmt.Fprintf(own, "round %d\n", count)
		check(err)
		line, err := answers.ReadString('\n')
		check(err)
		if line != fmt.Sprintf("round %d\n", count) {
			check(fmt.Errorf("answered %q", line))
		}
		for before := ticks.Load(); ticks.Load() < before+8; {
			time.Sleep(time.Millisecond)
		}
		fmt.Fprintf(conn, "%d %d\n", count, os.Getpid())
		conn.Close()
	}
}
