// Threads that fill a map and check it; answers each line of input with how far they are.
import java.io.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;

public class Count {
    static final ConcurrentHashMap<Long, String> map = new ConcurrentHashMap<>();
    static final AtomicLong next = new AtomicLong();

    static void fill() {
        try {
            while (true) {
                long number = next.getAndIncrement();
                map.put(number, "value " + number);
                long earlier = ThreadLocalRandom.current().nextLong(number + 1);
                String value = map.get(earlier);
                // The thread that has taken the number may not have put its value yet.
                if (value != null && !value.equals("value " + earlier)) throw new IllegalStateException(value);
                Thread.sleep(1);
            }
        } catch (Throwable error) {
            System.out.println("broken " + error);
            System.exit(1);
        }
    }

    public static void main(String[] arguments) throws Exception {
        for (int i = 0; i < 4; i++) {
            Thread thread = new Thread(Count::fill);
            thread.setDaemon(true);
            thread.start();
        }
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = input.readLine()) != null; ) {
            long taken = next.get();
            while (next.get() < taken + 4) Thread.sleep(1);
            for (long number = 0; number < taken - 4; number++) {
                if (!("value " + number).equals(map.get(number))) {
                    System.out.println("broken at " + number);
                    System.exit(1);
                }
            }
            System.out.println("whole " + line + " " + map.size());
        }
    }
}
