// Before the first paint, set the stored theme; the default is the system's.
(function () {
  try {
    var theme = localStorage.getItem("shoal.theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch (error) {
    // Without storage the system's theme is used.
  }
})();
