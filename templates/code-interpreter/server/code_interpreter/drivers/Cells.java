/* Runs cells of Java in this process: one line of JSON per request, one line per answer.
 *
 * Cells are snippets of JShell, which keeps what they declare and allows names to be declared again. They run in this process, so
 * that their output is that of the process. Java cannot change its environment, so variables are properties of the system.
 *
 * Usage: Cells REQUESTS ANSWERS, two descriptors.
 */

import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;
import jdk.jshell.UnresolvedReferenceException;

public final class Cells {
    private static final List<String> IMPORTS = List.of(
        "java.io.*", "java.math.*", "java.net.*", "java.nio.file.*", "java.util.*", "java.util.concurrent.*", "java.util.function.*",
        "java.util.regex.*", "java.util.stream.*");

    private final JShell shell = JShell.builder().executionEngine("local").build();
    private final Map<String, String> ofSandbox = new HashMap<>();
    private volatile boolean isRunning;
    private volatile boolean isInterrupted;

    public static void main(String[] given) throws Exception {
        System.setOut(new PrintStream(new FileOutputStream(java.io.FileDescriptor.out), true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(new FileOutputStream(java.io.FileDescriptor.err), true, StandardCharsets.UTF_8));
        System.setIn(InputStream.nullInputStream());
        InputStream requests = new FileInputStream("/dev/fd/" + given[0]);
        OutputStream answers = new FileOutputStream("/dev/fd/" + given[1]);
        Cells cells = new Cells();
        cells.prepare();
        say(answers, "{}");
        BufferedReader lines = new BufferedReader(new InputStreamReader(requests, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            say(answers, cells.run(line));
        }
        System.exit(0);
    }

    private static void say(OutputStream answers, String line) throws java.io.IOException {
        answers.write((line + "\n").getBytes(StandardCharsets.UTF_8));
        answers.flush();
    }

    private void prepare() {
        for (String name : IMPORTS) {
            shell.eval("import " + name + ";");
        }
        sun.misc.Signal.handle(new sun.misc.Signal("INT"), signal -> {
            if (isRunning) {
                isInterrupted = true;
                shell.stop();
            }
        });
    }

    @SuppressWarnings("unchecked")
    private String run(String line) {
        Map<String, Object> request = (Map<String, Object>) new Json(line).value();
        Map<String, String> sandbox = (Map<String, String>) request.get("sandbox");
        Map<String, String> call = (Map<String, String>) request.get("call");
        sandbox.forEach((name, value) -> {
            if (!value.equals(ofSandbox.put(name, value))) {
                System.setProperty(name, value);
            }
        });
        Map<String, String> before = new HashMap<>();
        call.forEach((name, value) -> before.put(name, System.setProperty(name, value)));
        isInterrupted = false;
        isRunning = true;
        try {
            return evaluate((String) request.get("code"));
        } finally {
            isRunning = false;
            System.out.flush();
            System.err.flush();
            before.forEach((name, value) -> {
                if (value == null) {
                    System.clearProperty(name);
                } else {
                    System.setProperty(name, value);
                }
            });
        }
    }

    private String evaluate(String code) {
        SnippetEvent last = null;
        for (String rest = code; !rest.isBlank();) {
            SourceCodeAnalysis.CompletionInfo part = shell.sourceCodeAnalysis().analyzeCompletion(rest);
            if (!part.completeness().isComplete()) {
                return failure("SyntaxError", reason(rest), "");
            }
            for (SnippetEvent event : shell.eval(part.source())) {
                if (isInterrupted) {
                    return failure("KeyboardInterrupt", "", "");
                }
                if (event.status() == Snippet.Status.REJECTED) {
                    return failure("SyntaxError", problems(event.snippet()), event.snippet().source());
                }
                if (event.exception() != null) {
                    return failure(event.exception());
                }
                if (event.causeSnippet() == null) {
                    last = event;
                }
            }
            rest = part.remaining();
        }
        if (last == null || last.value() == null || !isValue(last.snippet())) {
            return "{}";
        }
        return "{\"data\":{\"text/plain\":" + Json.text(last.value()) + "}}";
    }

    /** Whether a snippet is an expression with a value, and neither a statement nor a declaration. */
    private static boolean isValue(Snippet snippet) {
        return switch (snippet.subKind()) {
            case TEMP_VAR_EXPRESSION_SUBKIND, VAR_VALUE_SUBKIND, OTHER_EXPRESSION_SUBKIND -> true;
            default -> false;
        };
    }

    private String reason(String source) {
        for (SnippetEvent event : shell.eval(source)) {
            String found = problems(event.snippet());
            if (!found.isEmpty()) {
                return found;
            }
        }
        return "the cell is not complete";
    }

    private String problems(Snippet snippet) {
        List<String> found = new ArrayList<>();
        shell.diagnostics(snippet).forEach(problem -> found.add(problem.getMessage(Locale.ROOT)));
        return String.join("\n", found);
    }

    private String failure(Exception thrown) {
        String name = thrown instanceof EvalException one ? one.getExceptionClassName() : thrown.getClass().getName();
        String value = String.valueOf(thrown.getMessage() == null ? "" : thrown.getMessage());
        if (thrown instanceof UnresolvedReferenceException one) {
            List<String> missing = new ArrayList<>();
            shell.unresolvedDependencies(one.getSnippet()).forEach(missing::add);
            value = String.join(", ", missing);
        }
        StringBuilder trace = new StringBuilder(name + ": " + value);
        for (StackTraceElement element : thrown.getStackTrace()) {
            trace.append("\n\tat ").append(element);
        }
        return failure(name.substring(name.lastIndexOf('.') + 1).replaceAll(".*\\$", ""), value, trace.toString());
    }

    private static String failure(String name, String value, String traceback) {
        return "{\"error\":{\"name\":" + Json.text(name) + ",\"value\":" + Json.text(value) + ",\"traceback\":" + Json.text(traceback) + "}}";
    }

    /** JSON of requests, which the server writes: objects, texts and booleans. Java has none of its own. */
    private static final class Json {
        private final String text;
        private int at;

        Json(String text) {
            this.text = text;
        }

        Object value() {
            skip();
            char first = text.charAt(at);
            if (first == '{') {
                return object();
            }
            if (first == '"') {
                return string();
            }
            String word = text.substring(at).startsWith("true") ? "true" : "false";
            at += word.length();
            return Boolean.valueOf(word);
        }

        private void skip() {
            while (Character.isWhitespace(text.charAt(at)) || text.charAt(at) == ',' || text.charAt(at) == ':') {
                at++;
            }
        }

        private Map<String, Object> object() {
            Map<String, Object> found = new HashMap<>();
            at++;
            for (skip(); text.charAt(at) != '}'; skip()) {
                String name = string();
                found.put(name, value());
            }
            at++;
            return found;
        }

        private String string() {
            StringBuilder found = new StringBuilder();
            for (at++; text.charAt(at) != '"'; at++) {
                char one = text.charAt(at);
                if (one != '\\') {
                    found.append(one);
                    continue;
                }
                one = text.charAt(++at);
                switch (one) {
                    case 'b' -> found.append('\b');
                    case 'f' -> found.append('\f');
                    case 'n' -> found.append('\n');
                    case 'r' -> found.append('\r');
                    case 't' -> found.append('\t');
                    case 'u' -> {
                        found.append((char) Integer.parseInt(text.substring(at + 1, at + 5), 16));
                        at += 4;
                    }
                    default -> found.append(one);
                }
            }
            at++;
            return found.toString();
        }

        /** A text as JSON that is ASCII alone. */
        static String text(String value) {
            StringBuilder said = new StringBuilder("\"");
            for (int i = 0; i < value.length(); i++) {
                char one = value.charAt(i);
                if (one == '"' || one == '\\') {
                    said.append('\\').append(one);
                } else if (one < 0x20 || one > 0x7e) {
                    said.append(String.format("\\u%04x", (int) one));
                } else {
                    said.append(one);
                }
            }
            return said.append('"').toString();
        }
    }
}
