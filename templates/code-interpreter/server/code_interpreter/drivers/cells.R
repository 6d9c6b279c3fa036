# Runs cells of R in this process: one line of JSON per request, one line per answer.
#
# Every visible value of a cell is a result, as in a notebook, with the text that R prints for it; tables are HTML and data as well.
# A cell draws on a device of its own, whose pages are results.
#
# Usage: cells.R REQUESTS ANSWERS, two descriptors.

# Nothing of this is in the way of a cell, which is evaluated in the global environment.
local({
  given <- commandArgs(trailingOnly = TRUE)
  requests <- file(paste0("/dev/fd/", given[[1]]), "r", blocking = TRUE)
  answers <- file(paste0("/dev/fd/", given[[2]]), "w")
  # Rows of a table up to which it is sent as data beside its text.
  most_rows <- 100000
  of_sandbox <- list()

  say <- function(answer) {
    cat(jsonlite::toJSON(answer, auto_unbox = TRUE, null = "null", na = "null", digits = NA), "\n", sep = "", file = answers)
    flush(answers)
  }

  set <- function(name, value) do.call(Sys.setenv, stats::setNames(list(value), name))

  # What a value is, by MIME type.
  shown <- function(value) {
    text <- paste(utils::capture.output(print(value)), collapse = "\n")
    data <- list("text/plain" = text)
    if (is.data.frame(value)) {
      data[["text/html"]] <- tryCatch(repr::repr_html(value), error = function(failed) NULL)
      # A column may be a matrix, which is more than one list of values.
      if (nrow(value) <= most_rows && all(vapply(value, length, 0) == nrow(value))) {
        columns <- lapply(value, function(column) {
          plain <- if (is.numeric(column) || is.logical(column)) unclass(column) else as.character(column)
          if (is.numeric(plain)) plain[!is.finite(plain)] <- NA
          attributes(plain) <- NULL
          I(as.list(plain))
        })
        data[["e2b/data"]] <- columns
      }
    }
    data
  }

  # The pages of a device that have something on them.
  pictures <- function(directory) {
    pages <- list.files(directory, full.names = TRUE)
    lapply(pages, function(page) {
      list("image/png" = gsub("\n", "", jsonlite::base64_enc(readBin(page, "raw", file.size(page)))))
    })
  }

  run <- function(request) {
    for (name in names(request$sandbox)) {
      if (!identical(of_sandbox[[name]], request$sandbox[[name]])) set(name, request$sandbox[[name]])
    }
    of_sandbox <<- request$sandbox
    before <- lapply(stats::setNames(nm = names(request$call)), Sys.getenv, unset = NA)
    for (name in names(request$call)) set(name, request$call[[name]])
    directory <- tempfile("pages")
    dir.create(directory)
    options(device = function(...) {
      grDevices::png(file.path(directory, "page%06d.png"), width = 960, height = 720, res = 120)
    })
    results <- list()
    error <- NULL
    tryCatch(
      withCallingHandlers(
        for (part in parse(text = request$code, keep.source = FALSE)) {
          found <- withVisible(eval(part, globalenv()))
          if (found$visible) {
            # Plots of grid are drawn when they are printed, and are pictures then.
            if (inherits(found$value, c("ggplot", "trellis", "recordedplot"))) print(found$value)
            else results[[length(results) + 1]] <- shown(found$value)
          }
        },
        warning = function(met) {
          cat("Warning message:\n", conditionMessage(met), "\n", sep = "", file = stderr())
          invokeRestart("muffleWarning")
        }
      ),
      interrupt = function(met) error <<- list(name = "KeyboardInterrupt", value = "", traceback = ""),
      error = function(met) {
        call <- conditionCall(met)
        where <- if (is.null(call)) "" else paste0("Error in ", paste(deparse(call), collapse = "\n"), ": ")
        kind <- setdiff(class(met), c("simpleError", "error", "condition"))
        error <<- list(name = if (length(kind)) kind[[1]] else "Error", value = conditionMessage(met), traceback = paste0(where, conditionMessage(met)))
      }
    )
    grDevices::graphics.off()
    results <- c(results, pictures(directory))
    unlink(directory, recursive = TRUE)
    flush(stdout())
    for (name in names(before)) {
      if (is.na(before[[name]])) Sys.unsetenv(name) else set(name, before[[name]])
    }
    answer <- list(shown = I(results))
    if (!is.null(error)) answer$error <- error
    else if (length(results)) {
      answer$data <- results[[length(results)]]
      answer$shown <- I(results[-length(results)])
    }
    answer
  }

  # An interrupt that comes too late is for nobody.
  calm <- function(work) repeat tryCatch(return(work()), interrupt = function(met) NULL)

  say(list(shown = I(list())))
  repeat {
    line <- calm(function() readLines(requests, 1))
    if (!length(line)) break
    request <- jsonlite::fromJSON(line, simplifyVector = FALSE)
    answer <- tryCatch(run(request), interrupt = function(met) {
      list(error = list(name = "KeyboardInterrupt", value = "", traceback = ""))
    }, error = function(met) list(error = list(name = "Error", value = conditionMessage(met), traceback = "")))
    say(answer)
  }
})
